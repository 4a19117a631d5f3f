"""bitsandbytes' NF4, as transformers stores it: a matrix flattened, and JSON that says its shape.

`q_proj.weight` are two codes to a byte, [bytes, 1]; `weight.absmax` the scales of groups, quantised
as well where `weight.nested_absmax` is there; `weight.quant_map` the 16 levels. N rows and K
columns of a matrix.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.models.quantization_config import malformed
from penstock_kernels.quant import Format, Quantised
from penstock_kernels.quant.prequantized import bitsandbytes_scales, nf4_of_bitsandbytes

STATE = ".quant_state.bitsandbytes__nf4"


@dataclass(frozen=True)
class _State:
    """What the JSON beside a matrix says."""

    shape: tuple[int, int]
    group: int
    nested_group: int
    """Scales that share a scale; 0 where scales are floats."""
    nested_offset: float


@dataclass(frozen=True)
class Nf4:
    """Reads matrices of one group size."""

    format: Format

    def is_quantised(self, folder: SafetensorsFolder, name: str) -> bool:
        """Whether this weight is stored quantised. Bytes without a state are so, and broken."""
        return name in folder and (
            f"{name}{STATE}" in folder or folder.stored(name).dtype == torch.uint8
        )

    def codes_of(self, name: str) -> str:
        """The tensor that holds a weight's codes."""
        return name

    def shape(self, folder: SafetensorsFolder, name: str) -> tuple[int, int]:
        """(N, K) of a weight. Raises CapabilityError if nothing there says so."""
        return _state(folder, name).shape

    def rows(self, folder: SafetensorsFolder, name: str, first: int, end: int) -> Quantised:
        """Rows `first` to `end` of a weight, on the CPU.

        Raises:
            CapabilityError: a tensor is missing, or is not of the format; groups are of another
                size, or do not end where rows do.
        """
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
        _require_levels(folder, name, self.format)
        total = rows * columns // 2
        packed = _packed(folder, name, total, first * columns // 2, end * columns // 2)
        groups = columns // state.group
        scales = _scales(folder, name, state, rows * groups, first * groups, end * groups)
        return nf4_of_bitsandbytes(packed, scales, (end - first, columns), state.group)


def group_in(folder: SafetensorsFolder) -> int | None:
    """How many columns share a scale in the first matrix that a folder has; None if it has none."""
    first = next((name for name in sorted(folder.names()) if name.endswith(STATE)), None)
    return None if first is None else _state(folder, first.removesuffix(STATE)).group


def _state(folder: SafetensorsFolder, name: str) -> _State:
    said = name + STATE
    if said not in folder:
        raise malformed(said, "it is not there")
    stored = folder.stored(said)
    if stored.dtype != torch.uint8 or len(stored.shape) != 1:
        raise malformed(said, f"it is {stored.dtype} {stored.shape}, and would be bytes of JSON")
    try:
        state = json.loads(folder[said].numpy().tobytes())
    except ValueError as error:
        raise malformed(said, f"it is not JSON ({error})") from error
    match state:
        case {"quant_type": "nf4", "blocksize": int(group), "shape": [int(rows), int(columns)]} if (
            min(group, rows, columns) > 0
        ):
            nested, offset = _nested(state)
            if (nested > 0) == (f"{name}.nested_absmax" in folder):
                return _State((rows, columns), group, nested, offset)
    raise malformed(said, f"it says {json.dumps(state)[:200]}")


def _nested(state: dict[str, Any]) -> tuple[int, float]:
    match state:
        case {"nested_blocksize": int(size), "nested_offset": float(offset) | int(offset)}:
            return size, offset
    return 0, 0.0


def _require_levels(folder: SafetensorsFolder, name: str, format: Format) -> None:
    levels = _part(folder, f"{name}.quant_map", torch.float32, len(format.levels), 0, None)
    if not torch.equal(levels, torch.tensor(format.levels)):
        raise malformed(f"{name}.quant_map", "its levels are not those of NF4")


def _scales(
    folder: SafetensorsFolder, name: str, state: _State, count: int, first: int, end: int
) -> torch.Tensor:
    """Of groups `first` to `end` of `count`, float32."""
    each = f"{name}.absmax"
    if not state.nested_group:
        return _part(folder, each, torch.float32, count, first, end)
    # Whole groups of scales are made, of which the first few may belong to rows before.
    low, high = first // state.nested_group, -(-end // state.nested_group)
    begin = low * state.nested_group
    nested = -(-count // state.nested_group)
    made = bitsandbytes_scales(
        _part(folder, each, torch.uint8, count, begin, end),
        _part(folder, f"{name}.nested_quant_map", torch.float32, 256, 0, None),
        _part(folder, f"{name}.nested_absmax", torch.float32, nested, low, high),
        state.nested_offset,
        state.nested_group,
    )
    return made[first - begin :]


def _packed(folder: SafetensorsFolder, name: str, count: int, first: int, end: int) -> torch.Tensor:
    """Bytes `first` to `end` of `count`, which may be stored as numbers of several bytes each."""
    width = folder.stored(name).dtype.itemsize
    part = _part(folder, name, None, count // width, first // width, end // width)
    return part.view(torch.uint8)


def _part(
    folder: SafetensorsFolder,
    name: str,
    dtype: torch.dtype | None,
    count: int,
    first: int,
    end: int | None,
) -> torch.Tensor:
    """Numbers `first` to `end` of a tensor that is to hold `count`, flat."""
    if name not in folder:
        raise malformed(name, "it is not there")
    stored = folder.stored(name)
    long, *rest = stored.shape or (0,)
    if stored.dtype != (dtype or stored.dtype) or long != count or any(one != 1 for one in rest):
        raise malformed(
            name,
            f"it is {stored.dtype} {stored.shape}, and would be {count} of {dtype or stored.dtype}",
        )
    size = (count if end is None else end) - first
    return folder.box(name, (first, *(0 for _ in rest)), (size, *rest)).flatten()
