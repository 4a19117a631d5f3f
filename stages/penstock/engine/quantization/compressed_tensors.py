"""Export quantized matrices in the compressed-tensors format.

vLLM, SGLang and transformers read it. The format is that of the library `compressed-tensors`: names
and content of a layer's tensors, and the entry in config.json. N rows and K columns of a layer's
weight.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.errors import CapabilityError
from penstock.engine.hf.safetensors_writer import Kind
from penstock.engine.model_source import SchemeName
from penstock.engine.quantization.prequantized import CODES
from penstock_kernels.quant import FORMATS, Format, QuantizedTensor, get_format
from penstock_kernels.quant.published_layouts import tile_scales

# Servers have kernels for these; the first that divides all rows is used.
INT4_GROUPS = (128, 64, 32)

_TILE = 128
_FP8 = {"num_bits": 8, "type": "float"}
_INT8 = {"num_bits": 8, "type": "int"}
_DYNAMIC = {"dynamic": True, "symmetric": True}


@dataclass(frozen=True)
class Scheme:
    """The name of a format in config.json."""

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None


SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme(
        "float-quantized",
        {**_FP8, "strategy": "channel"},
        {**_FP8, "strategy": "token", **_DYNAMIC},
    ),
    "block_fp8": Scheme(
        "float-quantized",
        {**_FP8, "strategy": "block", "block_structure": [_TILE, _TILE]},
        {**_FP8, "strategy": "group", "group_size": _TILE, **_DYNAMIC},
    ),
    "int8": Scheme(
        "int-quantized",
        {**_INT8, "strategy": "channel"},
        {**_INT8, "strategy": "token", **_DYNAMIC},
    ),
    "int4": Scheme("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
    "nvfp4": Scheme(
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
}


def format_for(scheme: SchemeName, shapes: Mapping[str, tuple[int, ...]]) -> Format:
    """The format for matrices of all these shapes that servers support. Raises CapabilityError if
    there is none."""
    if scheme == "int4":
        for group in INT4_GROUPS:
            if not any(shape[-1] % group for shape in shapes.values()):
                return get_format("int4", group)
        _refuse(scheme, shapes, (1, INT4_GROUPS[-1]))
    format = FORMATS[scheme]
    if format.group is not None:
        _refuse(scheme, shapes, (format.tile_rows, format.group))
    return format


def _refuse(
    scheme: SchemeName, shapes: Mapping[str, tuple[int, ...]], multiple: tuple[int, int]
) -> None:
    for name, (rows, columns) in shapes.items():
        if rows % multiple[0] or columns % multiple[1]:
            sizes = f"multiples of {multiple[0]} x {multiple[1]}" if multiple[0] > 1 else ""
            raise CapabilityError(
                f"export.quantise: {name} is {rows} x {columns}, and {scheme} needs "
                f"{sizes or f'columns in multiples of {multiple[1]}'}.\n"
                "  Write fp8 or int8, which take every shape, or leave export.quantise out."
            )


def stored_tensors(layer: str, shape: tuple[int, ...], stored_format: Format) -> dict[str, Kind]:
    """The tensors that a layer's weight of this shape is stored as."""
    rows, columns = shape
    name, dtype = stored_format.name, CODES[stored_format.name]
    scales: Kind = ((rows, stored_format.num_groups(columns)), stored_format.scales_dtype)
    if name == "block_fp8":
        scales = (-(-rows // _TILE), scales[0][1]), torch.float32
    kinds: dict[str, Kind] = {"weight": (shape, dtype), "weight_scale": scales}
    # Eight codes in a word, or two in a byte.
    if name == "int4":
        kinds = {"weight_packed": ((rows, columns // 8), dtype), "weight_scale": scales}
        kinds["weight_shape"] = (2,), torch.int64
    elif name == "nvfp4":
        kinds = {"weight_packed": ((rows, columns // 2), dtype), "weight_scale": scales}
        kinds["weight_global_scale"] = (1,), torch.float32
    return {f"{layer}.{leaf}": kind for leaf, kind in kinds.items()}


def of_rows(layer: str, quantized: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The stored tensors of a block of rows, which begins at a tile's first row."""
    format = quantized.format
    leaf = "weight_packed" if format.name in ("int4", "nvfp4") else "weight"
    scales = tile_scales(quantized) if format.tile_rows > 1 else quantized.scales
    codes = quantized.codes.view(CODES[format.name])
    return {f"{layer}.{leaf}": codes, f"{layer}.weight_scale": scales}


def of_whole(
    layer: str, shape: tuple[int, ...], quantized: QuantizedTensor
) -> dict[str, torch.Tensor]:
    """The tensors stored once per matrix of this shape; `quantized` is any block of its rows."""
    if quantized.format.name == "int4":
        return {f"{layer}.weight_shape": torch.tensor(shape)}
    if quantized.global_scales is not None:
        # compressed-tensors divides by the global scale instead of multiplying.
        return {f"{layer}.weight_global_scale": quantized.global_scales[0].reciprocal()}
    return {}


def quantization_config(
    scheme: SchemeName, stored_format: Format, untouched: Iterable[str]
) -> dict[str, Any]:
    """The config.json entry: every linear layer is quantized except those in `untouched`."""
    scheme_config, group = SCHEMES[scheme], {}
    if stored_format.group is not None and stored_format.tile_rows == 1:
        group = {"group_size": stored_format.group}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme_config.format,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**scheme_config.weights, **group, "symmetric": True, "dynamic": False},
                "input_activations": dict(scheme_config.inputs) if scheme_config.inputs else None,
                "output_activations": None,
            }
        },
        "ignore": sorted(untouched),
    }
