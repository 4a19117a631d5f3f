"""The compose stage: a text model and a vision tower to the model of a run with `model.encoders`.

It runs while a run is planned, and only if no earlier run has composed the same: what is pinned,
and so in the cache keys of the other stages, is the content of its result. No torch until it runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from penstock.config.schema.base import Settings
from penstock.config.schema.model import SCALE_FACTOR, Projector
from penstock.core.cache.stage import Facts, Input, Source, Stage
from penstock.core.files import remove
from penstock.core.remote.urls import redact
from penstock.core.sources.hub import local_folder
from penstock.core.sources.pin import ENCODER_FILES, MODEL_FILES
from penstock.core.sources.pin_remote import resolve_folder
from penstock.models.builtin import SCHEME

if TYPE_CHECKING:
    from penstock.compose.form import Form
    from penstock.compose.parts import Encoder, TextModel

MODEL = "hf"
"""The folder of the model in the result."""


class ComposeSettings(Settings):
    """Cache identity of a composed model, besides its parts."""

    projector: Projector

    seed: int
    """Seed of the projector, and of parts without weights."""

    scale_factor: int | None = None
    """Of a pixel shuffle."""

    foundation: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Overrides of entries of the text model's config.json."""


@dataclass(frozen=True)
class PinnedPart:
    """A text model or a vision tower."""

    config: Source
    config_path: str
    """As typed."""
    weights: Source | None
    """None: drawn from the seed."""
    model_path: str | None

    @property
    def name(self) -> str:
        """For people: its hub id, or the last part of a path or URL."""
        source, typed = self.config, self.config_path
        if self.weights and self.model_path:
            source, typed = self.weights, self.model_path
        return source.pin["repo"] if source.pin["kind"] == "hub" else PurePath(redact(typed)).name

    def config_folder(self) -> str:
        """A local folder with its config.json, or `builtin:<name>`."""
        if self.config_path.startswith(SCHEME):
            return self.config_path
        return str(local_folder(self.config_path, self.config, ENCODER_FILES))

    def weights_folder(self) -> Path | None:
        """The local folder of its weights."""
        if self.weights is None or self.model_path is None:
            return None
        return local_folder(self.model_path, self.weights)


@dataclass(frozen=True)
class Compose(Stage):
    """Input: a text model and a vision tower. Output: `hf`, a folder with the model of both."""

    name: ClassVar[str] = "compose"
    version: ClassVar[int] = 1
    neutral: ClassVar[Mapping[str, Any]] = {"scale_factor": None}

    settings: ComposeSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    text: PinnedPart
    tokenizer: Source
    tokenizer_path: str
    """As typed."""
    image: PinnedPart

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The content of both parts."""
        inputs: dict[str, Input] = {
            "text_config": self.text.config,
            "tokenizer": self.tokenizer,
            "image_config": self.image.config,
        }
        if self.text.weights:
            inputs["text_weights"] = self.text.weights
        if self.image.weights:
            inputs["image_weights"] = self.image.weights
        return inputs

    def check(self) -> None:
        """Raise CapabilityError or ConfigError if the two cannot be put together. Reads no
        weights."""
        from penstock.compose.build import compose_config

        compose_config(*self._parts(with_weights=False), self._form)

    def run(self, out: Path) -> Facts:
        """Compose the model; an interrupted run starts over."""
        from penstock.compose.build import compose_folders

        remove(out / MODEL)
        text, encoder = self._parts()
        facts = compose_folders(text, encoder, out / MODEL, self._form, seed=self.settings.seed)
        parts = {"text": self.text, "image": self.image}
        return {**facts, "names": {kind: part.name for kind, part in parts.items()}}

    @property
    def _form(self) -> "Form":
        from penstock.compose.build import choose_form

        return choose_form(self.settings.projector, self.settings.scale_factor or SCALE_FACTOR)

    def _parts(self, *, with_weights: bool = True) -> "tuple[TextModel, Encoder]":
        from penstock.compose.parts import Encoder, TextModel

        text = TextModel(
            self.text.config_folder(),
            self.text.weights_folder() if with_weights else None,
            resolve_folder(self.tokenizer_path, self.tokenizer),
            self.tokenizer.pin.get("commit"),
            self.settings.foundation,
        )
        weights = self.image.weights_folder() if with_weights else None
        return text, Encoder(self.image.config_folder(), weights)


def model_keys(manifest: Mapping[str, Any]) -> set[str]:
    """The keys under which the composed model is an input of other stages, from its manifest: of
    its weights, and of its config alone."""
    files = [{**file, "name": file["path"].removeprefix(f"{MODEL}/")} for file in manifest["files"]]

    def key(*patterns: str) -> str:
        identity = [
            {name: file[name] for name in ("name", "bytes", "sha256")}
            for file in files
            if any(fnmatchcase(file["name"], pattern) for pattern in patterns)
        ]
        return Source({"kind": "files", "files": identity}).key

    return {key(*MODEL_FILES), key("config.json")}
