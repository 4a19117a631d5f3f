"""Read bitsandbytes NF4 weights: a flat matrix, and JSON with its shape, as transformers stores
them.

`q_proj.weight` has two codes per byte, [bytes, 1]; `weight.absmax` has the scales of blocks,
quantized as well (double quantization) if `weight.nested_absmax` exists; `weight.quant_map` has the
16 levels. N rows and K columns of a matrix.
"""

import json
from dataclasses import dataclass

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.models.quantization_config import malformed
from penstock_kernels.quant import Format, QuantizedTensor
from penstock_kernels.quant.published_layouts import bitsandbytes_scales, nf4_of_bitsandbytes

STATE = ".quant_state.bitsandbytes__nf4"


@dataclass(frozen=True)
class _State:
    """The JSON metadata of a matrix."""

    shape: tuple[int, int]
    group: int
    # The block size of double quantization; 0 if scales are floats.
    nested_group: int
    nested_offset: float


@dataclass(frozen=True)
class Nf4:
    """Reads matrices of one block size."""

    format: Format

    def is_quantized(self, folder: SafetensorsFolder, name: str) -> bool:
        """Whether this weight is stored quantized. uint8 data without metadata counts, and is
        malformed.
        """
        return name in folder and (
            f"{name}{STATE}" in folder or folder.stored(name).dtype == torch.uint8
        )

    def codes_tensor_name(self, name: str) -> str:
        return name

    def shape(self, folder: SafetensorsFolder, name: str) -> tuple[int, int]:
        """(N, K) of a weight. Raises CapabilityError if the metadata does not give it."""
        return _state(folder, name).shape

    def rows(self, folder: SafetensorsFolder, name: str, first: int, end: int) -> QuantizedTensor:
        """Rows `first` to `end` of a weight, on the CPU. Raises CapabilityError if a tensor is
        missing or malformed; blocks have another size, or cross rows."""
        state = _state(folder, name)
        rows, columns = state.shape
        if state.group != self.format.group:
            raise malformed(
                name, f"its groups are {state.group} wide, and others {self.format.group}"
            )
        if columns % state.group:
            raise malformed(
                name,
                f"groups of {state.group} do not end where its rows of {columns} do: a row would "
                "share scales with the next",
            )
        levels_name, levels = f"{name}.quant_map", self.format.levels
        stored = _part(folder, levels_name, torch.float32, len(levels), 0, None)
        if not torch.equal(stored, torch.tensor(levels)):
            raise malformed(levels_name, "its levels are not those of NF4")
        # Two codes in a byte; bytes may be stored in a wider dtype.
        itemsize = folder.stored(name).dtype.itemsize
        bounds = (row * columns // 2 // itemsize for row in (rows, first, end))
        packed = _part(folder, name, None, *bounds).view(torch.uint8)
        groups = columns // state.group
        scales = _scales(folder, name, state, rows * groups, first * groups, end * groups)
        return nf4_of_bitsandbytes(packed, scales, (end - first, columns), state.group)


def group_in(folder: SafetensorsFolder) -> int | None:
    """The block size of the first matrix in a folder; None if there is none."""
    first = next((name for name in sorted(folder.names()) if name.endswith(STATE)), None)
    return None if first is None else _state(folder, first.removesuffix(STATE)).group


def _state(folder: SafetensorsFolder, name: str) -> _State:
    state_name = name + STATE
    if state_name not in folder:
        raise malformed(state_name, "it is not there")
    stored = folder.stored(state_name)
    if stored.dtype != torch.uint8 or len(stored.shape) != 1:
        raise malformed(
            state_name, f"it is {stored.dtype} {stored.shape}, and would be bytes of JSON"
        )
    try:
        state = json.loads(folder[state_name].numpy().tobytes())
    except ValueError as error:
        raise malformed(state_name, f"it is not JSON ({error})") from error
    match state:
        case {"quant_type": "nf4", "blocksize": int(group), "shape": [int(rows), int(columns)]} if (
            min(group, rows, columns) > 0
        ):
            nested, offset = state.get("nested_blocksize"), state.get("nested_offset")
            if not isinstance(nested, int) or not isinstance(offset, (float, int)):
                nested, offset = 0, 0.0
            if (nested > 0) == (f"{name}.nested_absmax" in folder):
                return _State((rows, columns), group, nested, offset)
    raise malformed(state_name, f"it says {json.dumps(state)[:200]}")


def _scales(
    folder: SafetensorsFolder, name: str, state: _State, count: int, first: int, end: int
) -> torch.Tensor:
    absmax = f"{name}.absmax"
    if not state.nested_group:
        return _part(folder, absmax, torch.float32, count, first, end)
    # Dequantize full blocks of scales; the first few scales may belong to earlier rows.
    low, high = first // state.nested_group, -(-end // state.nested_group)
    begin = low * state.nested_group
    nested = -(-count // state.nested_group)
    scales = bitsandbytes_scales(
        _part(folder, absmax, torch.uint8, count, begin, end),
        # Scales are quantized to 8 bits.
        _part(folder, f"{name}.nested_quant_map", torch.float32, 256, 0, None),
        _part(folder, f"{name}.nested_absmax", torch.float32, nested, low, high),
        state.nested_offset,
        state.nested_group,
    )
    return scales[first - begin :]


def _part(
    folder: SafetensorsFolder,
    name: str,
    dtype: torch.dtype | None,
    count: int,
    first: int,
    end: int | None,
) -> torch.Tensor:
    """Elements `first` to `end` of a tensor that must hold `count`, flat."""
    if name not in folder:
        raise malformed(name, "it is not there")
    stored = folder.stored(name)
    dtype = dtype or stored.dtype
    long, *trailing = stored.shape or (0,)
    if stored.dtype != dtype or long != count or any(length != 1 for length in trailing):
        raise malformed(
            name, f"it is {stored.dtype} {stored.shape}, and would be {count} of {dtype}"
        )
    size = (count if end is None else end) - first
    return folder.box(name, (first, *(0 for _ in trailing)), (size, *trailing)).flatten()
