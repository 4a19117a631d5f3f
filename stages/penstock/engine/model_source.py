"""Where a run's model came from, and in which form it is to be written: no torch, only names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.config.schema.run import RunConfig, is_explicitly_set
from penstock.core.cache.stage import Source

DType = Literal["auto", "float32", "bfloat16", "float16"]
SchemeName = Literal["fp8", "block_fp8", "int8", "int4", "nvfp4"]


@dataclass(frozen=True)
class QuantizationArgs:
    """What was written of the base model's weights under adapters; None: nothing was."""

    format: str | None = None
    """`lora.quant_format`."""
    group: int | None = None
    """Columns that share a scale."""
    excluded: tuple[str, ...] | None = None
    """Modules, by names and patterns, that are not quantised."""


def quantization_args(run: RunConfig) -> QuantizationArgs | None:
    """What a run says of it."""
    lora = run.lora
    if not lora.enable_qlora:
        return None
    return QuantizationArgs(
        lora.quant_format if is_explicitly_set(run, "lora.quant_format") else None,
        lora.quant_group_size if is_explicitly_set(run, "lora.quant_group_size") else None,
        None if lora.exclude_modules is None else tuple(lora.exclude_modules),
    )


@dataclass(frozen=True)
class LoraArgs:
    """What a checkpoint alone does not say of its adapters."""

    alpha: float
    scaling: Literal["rank", "root"] = "rank"
    """What alpha is divided by."""
    dropout: float = 0.0
    """What they were trained with, for those who train them further."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the base model were trained as well."""


@dataclass(frozen=True)
class ModelSource:
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
    adapting: LoraArgs | None = None
    """None when there are no adapters."""
    quantising: QuantizationArgs | None = None
    """None when the base model is as it was stored."""
    adapter: Source | None = None
    """What adapters went on from; None when they started anew."""
    adapter_path: str | None = None
    """Its folder or hub id, as typed."""


@dataclass(frozen=True)
class ExportFormat:
    """How the files are written."""

    dtype: DType = "auto"
    """`auto`: what the base model declares, float32 for a random start; adapters that stay apart
    keep the precision they were trained in."""
    max_shard_bytes: int = 5_000_000_000
    merged: bool = True
    """Whether adapters are also merged into the model."""
    quantise: SchemeName | None = None
    """What the model's linear layers are rounded to; None leaves them as they are."""
