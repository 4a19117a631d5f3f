"""Validate `exclude_modules` entries against a model's layer names. No torch."""

from collections.abc import Sequence
from difflib import get_close_matches

from penstock.config.schema.quantization import names_layer
from penstock.core.errors import ConfigError
from penstock.models.weights import WeightMap


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
