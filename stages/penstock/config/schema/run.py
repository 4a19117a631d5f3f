"""The root of the schema: one config file."""

from typing import Any

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.data import DataConfig
from penstock.config.schema.export import ExportConfig, PushConfig
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.model import ModelConfig
from penstock.config.schema.pipeline import (
    DEFAULT_STAGES,
    STAGES,
    LaunchConfig,
    PipelineConfig,
    StageName,
)
from penstock.config.schema.preference import PreferenceConfig
from penstock.config.schema.release import ReleaseConfig
from penstock.config.schema.train import TrainConfig


class RunConfig(ConfigSection):
    """One fine-tuning run. `penstock.config.loading.load` builds it from a file and checks it
    against all rules."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The base model, its tokenizer and its implementation."""

    data: DataConfig
    """Data sources, their preparation, packing and loading."""

    train: TrainConfig
    """Objective, parallelism, optimizer, batch sizes, memory, checkpoints and logging."""

    lora: LoraConfig = Field(default_factory=LoraConfig)
    """LoRA and QLoRA: low-rank adapters."""

    preference: PreferenceConfig = Field(default_factory=PreferenceConfig)
    """Preference training: DPO, KTO, SimPO, ORPO and others."""

    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """The stages of the run, their cache and retries."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """How torchrun starts the training processes."""

    export: ExportConfig = Field(default_factory=ExportConfig)
    """Export of the trained model to Hugging Face's format."""

    push: PushConfig = Field(default_factory=PushConfig)
    """Upload of the exported model."""

    release: ReleaseConfig = Field(default_factory=ReleaseConfig)
    """Continuous training: retrain when there is new data, release the model if it is better."""

    @property
    def stages(self) -> tuple[StageName, ...]:
        """The stages to run, in order: those that are written, or the default ones, and `push` if
        it has a target.

        With several nodes only the first one exports and pushes, and a run that only evaluates has
        nothing to export.
        """
        chosen = set(self.pipeline.stages or DEFAULT_STAGES)
        if "train" in chosen and needs_reference(self):
            chosen.add("reference")
        if "pack" in chosen and self.data.encode_images:
            chosen.add("encode")
        if has_target(self) and self.pipeline.stages is None:
            chosen.add("push")
        if self.launch.node_rank or self.train.eval_only:
            chosen -= {"export", "push"}
        return tuple(stage for stage in STAGES if stage in chosen)

    def with_fields(self, section: str, **values: Any) -> "RunConfig":
        """A copy with these fields of a section, which are not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def with_row_length(self, length: int) -> "RunConfig":
        """A copy with the `row_length` that was chosen from the samples."""
        return self.model_copy(update={"data": self.data.with_row_length(length)})


def has_target(run: RunConfig) -> bool:
    """Whether the run has a push target."""
    return run.push.repo_id is not None or run.push.url is not None


def needs_reference(run: RunConfig) -> bool:
    """Whether the loss compares the model with a reference model."""
    return run.train.objective == "preference" and run.preference.has_reference


def trains_projector(run: RunConfig) -> bool:
    """Whether the projector of a model that is trained on images is trained."""
    freeze = run.model.freeze
    return not run.lora.enable_lora and freeze is not None and "projector" not in freeze


def is_explicitly_set(run: RunConfig, name: str) -> bool:
    """Whether `name` (`train.init_device`, `data.datasets.0.split`) was written in the file or in
    an override, whatever its value. No result depends on it: it is for messages, and for layouts
    that are chosen where none is written.

    Raises KeyError when there is no such setting.
    """
    value: Any = run
    is_written = True
    for step in name.split("."):
        if isinstance(value, list):
            value = value[int(step)]  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(value, ConfigSection) and step in type(value).model_fields:
            is_written = is_written and step in value.model_fields_set
            value = getattr(value, step)
        else:
            raise KeyError(name)
    return is_written
