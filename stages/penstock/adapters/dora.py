"""DoRA (Liu et al. 2024, sections 4.1 and 4.3): LoRA with a trained magnitude per output row.

W is [out, in], A [r, in], B [out, r] and the magnitudes m [out]. The layer's weight is m / |W + s B
A| * (W + s B A). |.| is the norm of each row; no gradient flows through it. For an embedding the
norms are those of columns. The norms and the formula are PEFT's.
"""

from collections.abc import Callable
from typing import Literal

import torch

from penstock.adapters.weight_delta import LoraDelta

Normed = Literal["plain", "dora"]

CHUNK_BYTES = 32 << 20

Rows = Callable[[int, int], torch.Tensor]
"""Returns the rows [start, end) of a weight."""

SumSquares = Callable[[torch.Tensor], torch.Tensor]
"""Turns sums of squares over the local part of each row or column into sums over all of it (an
all-reduce under tensor parallelism)."""


def no_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The hook, such as `SumSquares`, of what is not sharded."""
    return tensor


@torch.no_grad()
def row_norms(rows: Rows, delta: LoraDelta, sum_squares: SumSquares) -> torch.Tensor:
    """The norm of each row of `weight + delta`, fp32."""
    device = delta.left.device
    # Autocast would compute the product of A and B in 16 bits, and so the norms.
    with torch.autocast(device.type, enabled=False):
        count, columns = delta.shape
        norms = torch.empty(count, dtype=torch.float32, device=device)
        for start in range(0, count, stride := _rows_per_chunk(columns)):
            end = min(start + stride, count)
            merged = delta.add_to(rows(start, end), start)
            torch.sum(merged.square_(), dim=1, out=norms[start:end])
        return sum_squares(norms).sqrt()


@torch.no_grad()
def column_norms(weight: torch.Tensor, delta: LoraDelta, sum_squares: SumSquares) -> torch.Tensor:
    """The norm of each column of `weight + delta`, fp32."""
    with torch.autocast(weight.device.type, enabled=False):
        norms = weight.new_zeros(weight.shape[1], dtype=torch.float32)
        for start in range(0, len(weight), stride := _rows_per_chunk(weight.shape[1])):
            rows = delta.add_to(weight[start : start + stride], start)
            norms += rows.square_().sum(dim=0)
        return sum_squares(norms).sqrt()


def _rows_per_chunk(columns: int) -> int:
    return max(1, CHUNK_BYTES // (4 * columns))


def dora_scale(magnitude: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The factor `magnitude / norm` of each row or column. Norms are cast to the dtype of the
    magnitudes, so that magnitudes initialized from the norms give exactly 1."""
    return magnitude / norms.to(magnitude.dtype)
