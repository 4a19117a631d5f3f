"""Model and training settings of a server: those that a run has too, and its own."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.config.schema.base import PATH, ConfigSection
from penstock.config.schema.data import DataConfig
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.model import ModelConfig
from penstock.config.schema.served import with_served
from penstock.config.schema.train import TrainConfig


@with_served(model=ModelConfig, lora=LoraConfig)
class ServerModel(ConfigSection):
    """Base model, precision and adapters.

    Fields without a docstring have that of the run's field.
    """

    model_path: Annotated[str, PATH] = Field(min_length=1)
    """Pre-trained weights: a Hugging Face hub id, a local folder, or `builtin:tiny-qwen3`, a model
    with random weights."""

    model_name: str | None = Field(default=None, min_length=1)
    """Name that clients may use for the model, besides its path. Unset: the same as
    `model_path`."""

    config_path: Annotated[str | None, PATH] = Field(default=None, min_length=1)
    tokenizer_path: Annotated[str | None, PATH] = Field(default=None, min_length=1)
    backend: Literal["auto", "native", "transformers"] = "auto"
    encoders: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Must be empty: a server serves the model of one folder. `penstock models compose` writes one
    with a vision tower."""

    @field_validator("encoders")
    @classmethod
    def _is_composed(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value:
            raise ValueError(
                f"has encoders ({', '.join(sorted(value))}), and a server serves the model of one"
                " folder; leave it out, run `penstock models compose TEXT --image ENCODER -o OUT`,"
                " and write OUT as model_path"
            )
        return value


@with_served(train=TrainConfig, data=DataConfig)
class ServerTraining(ConfigSection):
    """Parallelism, memory, optimizer and packing.

    Fields without a docstring have that of the run's field.
    """

    pipeline_parallel_schedule: Literal["1F1B", "GPipe"] = "1F1B"
    """Pipeline schedule. `1F1B` stores few activations; `GPipe` is simpler."""

    optimizer: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] = "adamw"
    """Optimizer if a client does not request one."""

    sample_packing_sequence_len: int = Field(default=32_000, gt=0)
    """Maximum length of a packed sequence, and so of a sample, in tokens."""

    enable_packing: bool = True
    """Pack samples into sequences, with attention masked between them; false: each sample has a
    sequence of its own."""

    sample_packing_strategy: Literal["sequential", "best_fit", "balanced_dp"] = "sequential"
    """Sequence packing: consecutive samples (`sequential`), samples that fill sequences best
    (`best_fit`), or sequences that balance the computation over data-parallel replicas
    (`balanced_dp`)."""

    log_gradient_norms: bool = True
    """Report the gradient norm of each type of layer with each backward pass."""
