"""The export stage: converts a checkpoint to folders for transformers and peft."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import Settings
from penstock.core.cache.stage import Artifact, Facts, Input, Source, Stage, stage_key
from penstock.core.errors import ArtifactError
from penstock.engine.model_source import (
    DType,
    ExportFormat,
    ModelSource,
    MTPExport,
    SchemeName,
    Verify,
)


class ExportSettings(Settings):
    """Settings that determine the exported files."""

    format: Literal["hf"] = "hf"
    """A folder for transformers."""

    dtype: DType = "auto"
    """The dtype of the weights. `auto`: as in the base model's config, float32 for a randomly
    initialized model; a separate adapter keeps its training dtype."""

    max_shard_bytes: int = Field(default=5_000_000_000, gt=0)
    """Maximum size of a weight file; a larger tensor gets its own file."""

    merge_lora: bool = True
    """Whether the adapter is also merged into the model."""

    quantise: SchemeName | None = None
    """Quantization scheme of the linear layers in `hf/`, in compressed-tensors format."""

    mtp: MTPExport = "keep"
    """Whether `hf/` has the layers that predict further tokens."""

    model_card: bool = True
    """Whether `hf/` and `adapter/` get a model card."""


@dataclass(frozen=True)
class Export(Stage):
    """Converts a checkpoint to `hf/` and, with adapters, `adapter/`; also `base/` if the base model
    exists nowhere else."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 1
    neutral: ClassVar[Mapping[str, Any]] = {"model_card": False, "mtp": "keep"}

    settings: ExportSettings
    trained: Artifact
    origin: ModelSource
    """Only its sources are part of the identity; the key of `trained` covers the rest."""
    verify: Verify = "load"  # Not part of the identity: how the folders are verified

    def folder_names(self, *, has_adapter: bool) -> list[str]:
        """The folders that a push sends, of a run that trains an adapter or all weights."""
        if not has_adapter:
            return ["hf"]
        return ["hf", "adapter"] if self.settings.merge_lora else ["adapter"]

    @property
    def inputs(self) -> Mapping[str, Input]:
        inputs: dict[str, Input] = {
            "trained": self.trained,
            "config": self.origin.config,
            "tokenizer": self.origin.tokenizer,
        }
        if self.origin.chat_template:
            # Data that is not rendered here leaves it out of the key of `trained`.
            inputs["chat_template"] = Source(self.origin.chat_template.model_dump())
        if self.origin.weights:
            inputs["weights"] = self.origin.weights
        return inputs

    def run(self, out: Path) -> Facts:
        """Write the folders; weight files completed by an earlier attempt are kept.

        Raises ArtifactError if the checkpoint is incomplete or belongs to another model, StageError
        if a folder does not load in transformers or PEFT.
        """
        from penstock.engine.hf.export import write_folders
        from penstock.engine.hf.save_model import bytes_in
        from penstock.export.card import write_cards

        settings = self.settings
        form = ExportFormat(
            settings.dtype,
            settings.max_shard_bytes,
            settings.merge_lora,
            settings.quantise,
            settings.mtp,
            self.verify,
        )
        checkpoint = PurePosixPath(self.trained.facts["checkpoint"])
        if checkpoint.is_absolute() or ".." in checkpoint.parts:
            raise ArtifactError(
                f"the manifest in {self.trained.path} names the checkpoint {checkpoint}, which is "
                "outside of it.\n  Run the train stage again."
            )
        facts = write_folders(self.trained.path / checkpoint, self.origin, form, out)
        if settings.model_card:
            write_cards(out, facts, key=stage_key(self), origin=self.origin, trained=self.trained)
        return {**facts, "bytes": sum(bytes_in(out / name) for name in facts["folders"])}
