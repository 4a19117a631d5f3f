"""The two models that are composed: where their files are, and what is read of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import CapabilityError
from penstock.core.files import read_json_object
from penstock.models.builtin import SCHEME, builtin_encoder

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class TextModel:
    """A text model to put behind a vision tower."""

    config: str
    """A folder with its config.json, or `builtin:<name>`."""
    weights: Path | None
    """The folder of its weights; None: they are drawn from the seed."""
    tokenizer: str
    """A folder, a hub id or `builtin:<name>`."""
    tokenizer_revision: str | None = None
    foundation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Overrides of entries of its config.json."""

    @classmethod
    def of_folder(cls, folder: Path) -> "TextModel":
        """A model with all its files in one folder."""
        return cls(str(folder), folder, str(folder))


@dataclass(frozen=True)
class Encoder:
    """A vision tower."""

    config: str
    """A folder with config.json and preprocessor_config.json, or `builtin:<name>`."""
    weights: Path | None
    """The folder of its weights; None: they are drawn from the seed."""

    def read(self) -> dict[str, Any]:
        """Its config.json. Raises CapabilityError if it has none."""
        if self.config.startswith(SCHEME):
            return builtin_encoder(self.config).config
        return self._read_file(CONFIG, ".\n  Name the folder of a vision model.")

    def read_preprocessor(self) -> dict[str, Any]:
        """Its preprocessor_config.json. Raises CapabilityError if it has none."""
        if self.config.startswith(SCHEME):
            return builtin_encoder(self.config).preprocessor
        remedy = "Put that of the vision model there."
        return self._read_file(PREPROCESSOR, f", which says how images are prepared.\n  {remedy}")

    def _read_file(self, name: str, why: str) -> dict[str, Any]:
        file = Path(self.config) / name
        if not file.is_file():
            raise CapabilityError(f"{self.config} has no {name}{why}")
        return read_json_object(file)

    def vision_config(self, vision_type: str) -> dict[str, Any]:
        """The config of its vision model, of this type, with the defaults of fields that the file
        leaves out."""
        from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

        config = self.read()
        # A CLIP's config.json is of a text model, too; that of a tower alone is the vision config
        # itself.
        vision_config = {
            k: v for k, v in config.get("vision_config", config).items() if k != "model_type"
        }
        return AutoConfig.for_model(vision_type, **vision_config).to_dict()

    def tensors(self, vision_config: Mapping[str, Any], seed: int) -> "dict[str, torch.Tensor]":
        """The tensors of its vision model, by their names in transformers' class."""
        import torch  # noqa: PLC0415
        from transformers import AutoConfig, AutoModel  # noqa: PLC0415 - takes seconds

        vision = dict(vision_config)
        config = AutoConfig.for_model(vision.pop("model_type"), **vision)
        # transformers draws from the global generator. Without devices, no CUDA context is created.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModel.from_config(config, dtype=torch.float32)
        if self.weights:
            # AutoModel would take the class that the folder's config.json names, with a text model.
            load = type(model).from_pretrained
            # Not *.bin: unpickling can run code.
            model = load(self.weights, config=config, dtype="auto", use_safetensors=True)
        return model.state_dict()
