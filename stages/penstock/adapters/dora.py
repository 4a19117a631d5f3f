"""DoRA: an adapted weight is given the norms that are trained beside its factors.

W is [out, in], with A [r, in], B [out, r] and magnitudes m [out]; the layer computes with
(m / |W + s B A|) (W + s B A), the norm of each row, through which no gradient flows (Liu et al.
2024, sections 4.1 and 4.3). For an embedding norms are those of columns. The norm and its formula
are PEFT's.
"""

from collections.abc import Callable
from typing import Literal

import torch

from penstock.adapters.weight_delta import LoraDelta

Normed = Literal["plain", "dora"]
"""Whether adapted weights have magnitudes."""

STRETCH = 32 << 20
"""Bytes of the weight's rows, in fp32, that are held at a time."""

Rows = Callable[[int, int], torch.Tensor]
"""The rows of a weight from one number to another."""

SumSquares = Callable[[torch.Tensor], torch.Tensor]
"""From sums of squares over what of each row or column is here to those over all of it."""


def all_here(squares: torch.Tensor) -> torch.Tensor:
    """Where whole rows and columns are here."""
    return squares


@torch.no_grad()
def row_norms(rows: Rows, product: LoraDelta, sum_squares: SumSquares) -> torch.Tensor:
    """The norm of each row of the sum of a weight and a product, fp32."""
    device = product.left.device
    with torch.autocast(device.type, enabled=False):
        count, columns = product.shape
        found = torch.empty(count, dtype=torch.float32, device=device)
        for start in range(0, count, stride := _rows_at_once(columns)):
            end = min(start + stride, count)
            made = product.added_to(rows(start, end), start)
            torch.sum(made.square_(), dim=1, out=found[start:end])
        return sum_squares(found).sqrt()


@torch.no_grad()
def column_norms(weight: torch.Tensor, product: LoraDelta, sum_squares: SumSquares) -> torch.Tensor:
    """The norm of each column of the sum of weight and product, fp32."""
    with torch.autocast(weight.device.type, enabled=False):
        found = weight.new_zeros(weight.shape[1], dtype=torch.float32)
        for start in range(0, len(weight), stride := _rows_at_once(weight.shape[1])):
            rows = product.added_to(weight[start : start + stride], start)
            found += rows.square_().sum(dim=0)
        return sum_squares(found).sqrt()


def _rows_at_once(columns: int) -> int:
    return max(1, STRETCH // (4 * columns))


def dora_scale(magnitude: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """What rows or columns are multiplied by.

    Norms are rounded as magnitudes are, so that what starts at the norm starts at 1.
    """
    return magnitude / norms.to(magnitude.dtype)
