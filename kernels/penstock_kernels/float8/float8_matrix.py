"""A matrix in FP8, with its scales.

R rows, C columns (the contracted dimension); B = 128 columns of a group.
"""

from typing import Literal, NamedTuple

import torch

BLOCK = 128

Sharing = Literal["tensor", "rows", "groups", "tiles"]
"""Sharing of scales: the tensor, a row, B columns of a row, or B columns of B rows."""

Sums = Literal["exact", "fast"]
"""Accumulation in float32, or with about 14 bits on Hopper's tensor cores, if available."""


class Float8Matrix(NamedTuple):
    """FP8 codes and scales of a matrix."""

    codes: torch.Tensor
    """[R, C] float8, rows one after another."""
    scales: torch.Tensor
    """float32, [1, 1], [R, 1], [R, C / B] or [R / B, C / B], rounded up: codes times these are the
    numbers."""
    sharing: Sharing

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix [R, C]; exact in float32 and bfloat16."""
        rows, columns = self.codes.shape
        scales = spread(self.scales, self.sharing, rows, columns)
        return self.codes.to(dtype) * scales.to(dtype)


def shape_of_scales(sharing: Sharing, rows: int, columns: int) -> tuple[int, int]:
    """Shape of a matrix's scales."""
    across, down = -(-columns // BLOCK), -(-rows // BLOCK)
    shapes = {
        "tensor": (1, 1),
        "rows": (rows, 1),
        "groups": (rows, across),
        "tiles": (down, across),
    }
    return shapes[sharing]


def spread(scales: torch.Tensor, sharing: Sharing, rows: int, columns: int) -> torch.Tensor:
    """The scale of each element, broadcastable to [R, C]."""
    if sharing == "tiles":
        scales = scales.repeat_interleave(BLOCK, 0)[:rows]
    if sharing in ("tiles", "groups"):
        scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    return scales
