"""Check settings of quantization against a model and its checkpoint. No torch here."""

from collections.abc import Sequence
from difflib import get_close_matches

from penstock.config.schema.quantization import names_layer
from penstock.core.errors import ConfigError
from penstock.engine.model_source import QuantizationArgs
from penstock.models.quantization_config import QuantizationConfig
from penstock.models.weights import WeightMap


def validate_prequantized(
    quantizing: QuantizationArgs | None, declared: QuantizationConfig
) -> None:
    """Raise ConfigError for settings that a pre-quantized checkpoint cannot be used with.
    `quantizing` is None for a run without QLoRA, which dequantizes the weights as it reads them."""
    if quantizing is None:
        return
    # Rounding its codes to other levels would lose precision twice.
    kind = f"{declared.format} ({declared.quant_method})"
    instead = (
        "as it is.\n  Leave {} out, or name the model that it was quantized from as "
        "model.model_path."
    )
    if quantizing.format not in (None, declared.format):
        raise ConfigError(
            f"lora.quant_format is {quantizing.format}, and the model is published in {kind}, "
            f"which is used {instead.format('quant_format')}"
        )
    # bitsandbytes stores the block size with each matrix.
    is_said = declared.group_size is not None or declared.quant_method != "bitsandbytes"
    if is_said and quantizing.group not in (None, declared.group_size):
        has = f"groups of {declared.group_size}" if declared.group_size else "a scale for each row"
        raise ConfigError(
            f"lora.quant_group_size is {quantizing.group}, and the model is published in {kind} "
            f"with {has}, which is used {instead.format('quant_group_size')}"
        )


def require_known(field: str, entries: Sequence[str], names: WeightMap) -> None:
    """Raise ConfigError for an entry of the setting `field` that matches no layer of the model."""
    layers = [name.removesuffix(".weight") for name in names.hf_shapes()]
    for entry in entries:
        if any(names_layer(entry, layer) for layer in layers):
            continue
        parts = sorted({part for layer in layers for part in layer.split(".")})
        near = get_close_matches(entry, parts, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{field}: {entry!r} names no module of this model{hint}.")


def fused(field: str, layer: str) -> str:
    """The error for an entry that excludes part of a fused projection."""
    return (
        f"{field} leaves out {layer}, which is computed in one with its like (model.merge_qkv).\n"
        "  Write merge_qkv: false, or leave all three out."
    )
