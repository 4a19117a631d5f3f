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
from penstock_kernels.quant import FORMATS, Format, QuantizedTensor, get_format
from penstock_kernels.quant.published_layouts import tile_scales

INT4_GROUPS = (128, 64, 32)
"""int4 group sizes; the first that divides all rows is used, because servers have kernels for
these.
"""

_TILE = 128
_PER_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}


@dataclass(frozen=True)
class Scheme:
    """The name of a format in config.json."""

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    """How activations are quantized at serving time; None: not quantized."""


SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", **_PER_TOKEN},
    ),
    "block_fp8": Scheme(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [_TILE, _TILE]},
        {
            "num_bits": 8,
            "type": "float",
            "strategy": "group",
            "group_size": _TILE,
            "dynamic": True,
            "symmetric": True,
        },
    ),
    "int8": Scheme(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", **_PER_TOKEN},
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
    """The format for matrices of all these shapes that servers support.

    Raises:
        CapabilityError: there is none.
    """
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
    scales: Kind = ((rows, stored_format.num_groups(columns)), stored_format.scales_dtype)
    match stored_format.name:
        case "fp8" | "int8":
            dtype = torch.int8 if stored_format.name == "int8" else torch.float8_e4m3fn
            kinds: dict[str, Kind] = {"weight": (shape, dtype), "weight_scale": scales}
        case "block_fp8":
            tiles: Kind = ((-(-rows // _TILE), scales[0][1]), torch.float32)
            kinds = {"weight": (shape, torch.float8_e4m3fn), "weight_scale": tiles}
        case "int4":
            kinds = {
                # Eight codes in a word.
                "weight_packed": ((rows, columns // 8), torch.int32),
                "weight_scale": scales,
                "weight_shape": ((2,), torch.int64),
            }
        case "nvfp4":
            kinds = {
                # Two codes in a byte.
                "weight_packed": ((rows, columns // 2), torch.uint8),
                "weight_scale": scales,
                "weight_global_scale": ((1,), torch.float32),
            }
        case name:
            raise AssertionError(name)
    return {f"{layer}.{leaf}": kind for leaf, kind in kinds.items()}


def of_rows(layer: str, quantized: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The stored tensors of a block of rows, which begins at a tile's first row."""
    match quantized.format.name:
        case "fp8" | "block_fp8":
            tensors = {"weight": quantized.codes.view(torch.float8_e4m3fn)}
        case "int8":
            tensors = {"weight": quantized.codes.view(torch.int8)}
        case "int4":
            tensors = {"weight_packed": quantized.codes.view(torch.int32)}
        case _:
            tensors = {"weight_packed": quantized.codes}
    is_tiled = quantized.format.tile_rows > 1
    tensors["weight_scale"] = tile_scales(quantized) if is_tiled else quantized.scales
    return {f"{layer}.{leaf}": tensor for leaf, tensor in tensors.items()}


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
    scheme_config = SCHEMES[scheme]
    group = (
        {}
        if stored_format.group is None or stored_format.tile_rows > 1
        else {"group_size": stored_format.group}
    )
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
