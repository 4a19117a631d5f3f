"""Quantization formats: group size, code, bytes of a row.

Scales, like codes, belong to rows of one matrix and never span rows: a row's groups
begin at its first column, and its last group may be short.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

__all__ = ["FORMATS", "Format", "get_format"]

# Quantiles of the normal distribution, as published with QLoRA (Dettmers et al., 2023) and used by
# bitsandbytes; read as float32.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# Midpoints of neighboring levels, exact here and rounded to float32 where they are compared.
NF4_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(NF4))

# OCP Microscaling Formats 1.0, section 5.3.3; bit 3 is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))

INT4 = tuple(float(code - 8) for code in range(16))

SCALE_DTYPES = {
    "float32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Format:
    """One quantization format."""

    name: str
    codes: Literal["levels", "int8", "e4m3"]
    """4-bit codes of 16 levels, two in a byte, or one-byte values."""
    group: int | None
    """Columns that share a scale; None: the whole row."""
    tile_rows: int = 1
    """Rows that share a scale. It is kept with each of them, so that rows can be cut anywhere."""
    scales: Literal["float32", "e4m3", "e8m0"] = "float32"
    """e4m3 scales are multiples of a float32 scale of the matrix, repeated for each row; e8m0 are
    powers of two."""
    levels: tuple[float, ...] = ()
    groups_allowed: tuple[int, ...] = ()
    """Other supported values of `group`."""

    @property
    def scales_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scales]

    def num_groups(self, columns: int) -> int:
        """Groups in a row."""
        return 1 if self.group is None else -(-columns // self.group)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row's codes. 4-bit codes are padded to whole groups."""
        if self.codes == "levels":
            assert self.group is not None
            return self.num_groups(columns) * self.group // 2
        return columns

    def widths(self, columns: int) -> dict[str, int]:
        """Bytes of a row in each tensor of a QuantizedTensor, by name."""
        bits = {
            "codes": self.row_bytes(columns),
            "scales": self.num_groups(columns) * self.scales_dtype.itemsize,
        }
        return bits | {"global_scales": 4} if self.scales == "e4m3" else bits


# Powers of two: tiles on Triton hold whole groups, and its ranges have such lengths.
_POWERS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("nf4", "levels", 64, levels=NF4, groups_allowed=_POWERS),
        Format("nvfp4", "levels", 16, scales="e4m3", levels=E2M1),
        Format("mxfp4", "levels", 32, scales="e8m0", levels=E2M1),
        Format("int4", "levels", 128, levels=INT4, groups_allowed=_POWERS),
        Format("int8", "int8", None),
        Format("fp8", "e4m3", None),
        Format("block_fp8", "e4m3", 128, tile_rows=128),
    )
}
"""All formats by name, with the published group sizes."""


def get_format(name: str, group: int | None = None) -> Format:
    """The format of this name, optionally with another group size.

    Raises:
        ValueError: there is no such format, or it has no groups of this size.
    """
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    format = FORMATS[name]
    if group is None or group == format.group:
        return format
    if group not in format.groups_allowed:
        has = "a scale for each row" if format.group is None else f"groups of {format.group}"
        allowed = ", ".join(map(str, format.groups_allowed))
        has = f"groups of {allowed}" if allowed else f"{has} and no others"
        raise ValueError(f"{name} cannot have groups of {group} columns; it has {has}")
    return replace(format, group=group)
