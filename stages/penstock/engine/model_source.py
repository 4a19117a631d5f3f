"""Model source and export format: where a run's model came from. No torch, only names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import Source
from penstock.rows.chat_template import ChatTemplate

DType = Literal["auto", "float32", "bfloat16", "float16"]
SchemeName = Literal["fp8", "block_fp8", "int8", "int4", "nvfp4"]
MTPExport = Literal["keep", "drop"]
Verify = Literal["load", "logits", "off"]


@dataclass(frozen=True)
class QuantizationArgs:
    """The QLoRA settings as written; None: the default, or not set."""

    format: str | None = None
    """`lora.quant_format`."""
    group: int | None = None
    excluded: tuple[str, ...] | None = None
    """Modules that are not quantized, by name and pattern."""


def quantization_args(run: RunConfig) -> QuantizationArgs | None:
    """The QLoRA settings of a run; None without QLoRA."""
    lora = run.lora
    if not lora.enable_qlora:
        return None
    return QuantizationArgs(
        lora.quant_format if lora.is_non_default("quant_format") else None,
        lora.quant_group_size,
        None if lora.exclude_modules is None else tuple(lora.exclude_modules),
    )


@dataclass(frozen=True)
class LoraArgs:
    """LoRA settings that a checkpoint alone does not contain."""

    alpha: float
    scaling: Literal["rank", "root"] = "rank"
    """What alpha is divided by: the rank, or its square root (rsLoRA)."""
    dropout: float = 0.0
    """The dropout in training, used if training is resumed."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the base model were trained as well."""


@dataclass(frozen=True)
class ModelSource:
    """Model facts that a checkpoint alone does not contain."""

    config: Source
    config_path: str
    """Folder, file, hub id or `builtin:<name>` of the config.json, as typed."""
    weights: Source | None
    """The base model's weights; None for training from random initialization."""
    model_path: str | None
    """Folder or hub id of the base model, as typed; adapters name it as their base."""
    tokenizer: Source
    tokenizer_path: str
    chat_template: ChatTemplate | None = None
    """The chat template that the run was given; None for the tokenizer's own."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    foundation: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 42
    """The seed of a random initialization."""
    adapting: LoraArgs | None = None
    quantizing: QuantizationArgs | None = None
    adapter: Source | None = None
    """The adapter that training resumed from; None for new adapters."""
    runs_code: bool = False
    """Whether the code beside the config.json is run (`model.trust_remote_code`)."""
    adapter_path: str | None = None
    """Its folder or hub id, as typed."""
    layer_versions: Mapping[str, Any] = field(default_factory=dict)
    """Versions of layers that are part of the cache keys of this model's results."""


@dataclass(frozen=True)
class ExportFormat:
    """How the files are written."""

    dtype: DType = "auto"
    """`auto`: the dtype that the base model declares, float32 for a random initialization; separate
    adapters keep their training dtype.
    """
    max_shard_bytes: int = 5_000_000_000
    merged: bool = True
    """Whether adapters are also merged into the model."""
    quantize: SchemeName | None = None
    """The quantization format of linear layers; None: unquantized."""
    mtp: MTPExport = "keep"
    verify: Verify = "off"
