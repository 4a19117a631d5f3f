"""The export stage: a checkpoint to folders that transformers and peft load."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import Settings
from penstock.core.cache.stage import Artifact, Facts, Input, Stage, stage_key
from penstock.core.errors import ArtifactError
from penstock.engine.model_source import DType, ExportFormat, ModelSource, SchemeName


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

    quantise: SchemeName | None = None
    """What the linear layers in `hf/` are rounded to, in the layout of compressed-tensors."""

    model_card: bool = True
    """Whether `hf/` and `adapter/` have a README.md that says what they are."""


@dataclass(frozen=True)
class Export(Stage):
    """A checkpoint in, `hf/` and with adapters `adapter/` out; `base/` where nobody else has it."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 1
    neutral: ClassVar[Mapping[str, Any]] = {"model_card": False}

    settings: ExportSettings
    trained: Artifact
    origin: ModelSource
    """Of which the sources are identity; the key of `trained` holds the rest."""

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The trained model, and what is put beside its weights."""
        found: dict[str, Input] = {
            "trained": self.trained,
            "config": self.origin.config,
            "tokenizer": self.origin.tokenizer,
        }
        if self.origin.weights:
            found["weights"] = self.origin.weights
        return found

    def run(self, out: Path) -> Facts:
        """Write the folders, keeping the weight files that an earlier attempt finished.

        Raises ArtifactError when the checkpoint is not complete or not of this model.
        """
        from penstock.engine.hf.export import write_folders
        from penstock.engine.hf.save_model import bytes_in
        from penstock.export.card import write_cards

        settings = self.settings
        form = ExportFormat(
            settings.dtype, settings.max_shard_bytes, settings.merge_lora, settings.quantise
        )
        facts = write_folders(self._checkpoint(), self.origin, form, out)
        if settings.model_card:
            write_cards(out, facts, key=stage_key(self), origin=self.origin, trained=self.trained)
        return {**facts, "bytes": sum(bytes_in(out / name) for name in facts["folders"])}

    def _checkpoint(self) -> Path:
        relative = PurePosixPath(self.trained.facts["checkpoint"])
        if relative.is_absolute() or ".." in relative.parts:
            raise ArtifactError(
                f"the manifest in {self.trained.path} names the checkpoint {relative}, which lies "
                "outside of it.\n  Run the train stage again."
            )
        return self.trained.path / relative
