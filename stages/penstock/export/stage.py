"""The export stage: a checkpoint to folders that transformers and peft load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.config.base import Settings
from penstock.core.stage import Artifact, Facts, Input, Source, Stage

DType = Literal["auto", "float32", "bfloat16", "float16"]


class ExportSettings(Settings):
    """What the exported files hold."""

    format: Literal["hf"] = "hf"
    """A folder that transformers loads."""

    dtype: DType = "auto"
    """Precision of the weights. `auto`: what the base model's config declares, float32 for a model
    that started at random; an adapter that stays apart keeps the precision it was trained in."""

    max_shard_bytes: int = Field(default=5_000_000_000, gt=0)
    """Largest weight file; a tensor that is larger by itself gets a file of its own."""

    merge_lora: bool = True
    """Whether an adapter is also merged into the model."""

    quantise: None = None
    """Weights are not quantised."""


@dataclass(frozen=True)
class Export(Stage):
    """A checkpoint in, `hf/` and with adapters `adapter/` out; `base/` where nobody else has it."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 1

    settings: ExportSettings
    trained: Artifact
    config: Source
    weights: Source | None
    """The base model's weights; None when training started at random."""
    tokenizer: Source

    # How: the key of `trained` holds all of this; here it says where to read, and as what.
    config_path: str
    """Folder, file, hub id or `builtin:<name>` of the config.json, as typed."""
    model_path: str | None
    """Folder or hub id of the base model, as typed; adapters name it as their base."""
    tokenizer_path: str
    foundation: Mapping[str, Any] = field(default_factory=dict)
    """What was laid over the config.json."""
    seed: int = 42
    """What a random start was drawn from."""
    lora_alpha: float | None = None
    """Scale of the adapters; None when there are none."""

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The trained model, and what is put beside its weights."""
        found: dict[str, Input] = {
            "trained": self.trained,
            "config": self.config,
            "tokenizer": self.tokenizer,
        }
        if self.weights:
            found["weights"] = self.weights
        return found

    def run(self, out: Path) -> Facts:
        """Write the folders, keeping the weight files that an earlier attempt finished.

        Raises ArtifactError when the checkpoint is not complete or not of this model.
        """
        from penstock.export.folders import write_folders

        return write_folders(self, out)
