"""Where a run's model came from, and in which form it is to be written: no torch, only names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.core.stage import Source

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Origin:
    """What a checkpoint alone does not say of its model."""

    config: Source
    config_path: str
    """Folder, file, hub id or `builtin:<name>` of the config.json, as typed."""
    weights: Source | None
    """The base model's weights; None when training started at random."""
    model_path: str | None
    """Folder or hub id of the base model, as typed; adapters name it as their base."""
    tokenizer: Source
    tokenizer_path: str
    foundation: Mapping[str, Any] = field(default_factory=dict)
    """What was laid over the config.json."""
    seed: int = 42
    """What a random start was drawn from."""
    lora_alpha: float | None = None
    """Scale of the adapters; None when there are none."""


@dataclass(frozen=True)
class Form:
    """How the files are written."""

    dtype: DType = "auto"
    """`auto`: what the base model declares, float32 for a random start; adapters that stay apart
    keep the precision they were trained in."""
    max_shard_bytes: int = 5_000_000_000
    merged: bool = True
    """Whether adapters are also merged into the model."""
