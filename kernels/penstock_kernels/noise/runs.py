"""Validation of a weight, its quantized matrix, and the keys of its rows."""

import math
from collections.abc import Sequence

import torch

from penstock_kernels.quant import QuantizedTensor
from penstock_kernels.rng_rows import RowKeys, require_rows


def require_runs(
    weight_NK: torch.Tensor,
    quantized: QuantizedTensor,
    alpha: float,
    runs: Sequence[RowKeys],
    first_column: int,
) -> None:
    """Refuse inconsistent arguments.

    Raises:
        ValueError: the weight is not of the quantized one's shape, the runs are not its rows, a key
            has more than 64 bits, columns begin within a group, or `alpha` is negative or not
            finite.
    """
    if tuple(weight_NK.shape) != quantized.shape:
        raise ValueError(f"the weight is {tuple(weight_NK.shape)}, and quantized {quantized.shape}")
    require_rows(quantized.shape, runs, first_column)
    group = quantized.format.group
    if group and first_column % group:
        raise ValueError(
            f"columns begin at {first_column}, and {quantized.format.name} has groups of {group}"
        )
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha is {alpha}; it must be finite and at least 0")
