"""Definition of counter-based noise; slow.

N rows, K columns, a stack of such matrices with leading dimensions; R rows of all.
"""

import math
from collections.abc import Sequence

import torch

from penstock_kernels.quant import QuantizedTensor, step_size
from penstock_kernels.rng_rows import RowKeys, blocks, require_rows, side_by_side, words

# The last word of counters: one key draws other words here than in `dropout`, where it is 0.
PURPOSE = 1


def add_noise_(
    weight_NK: torch.Tensor,
    quantized: QuantizedTensor,
    alpha: float,
    runs: Sequence[RowKeys],
    first_column: int = 0,
) -> torch.Tensor:
    """`weight + alpha * n * step`, in place: n is normal, and step is the group's `step_size`.

    `weight` [..., N, K] is the dequantized `quantized`; the sum is computed in float32 and rounded
    once. `runs` name the tensors of all R rows, in order, and `first_column` is the index of the
    first column in the full tensor. An element's random number is a function of its run's key and
    of its row and column in the full tensor, see `normals`.

    Raises:
        ValueError: the arguments do not fit together.
    """
    require_runs(weight_NK, quantized, alpha, runs, first_column)
    if alpha == 0:
        return weight_NK
    columns, group = quantized.columns, quantized.format.group
    # A view, so that writes change the original.
    weight_RK = weight_NK.view(-1, columns)
    # By group, before it is repeated for columns.
    spread_RG = (step_size(quantized) * alpha).flatten(0, -2)
    for rows_slice, run in blocks(runs, columns):
        noise = normals(run, first_column, columns, weight_RK.device)
        spread = spread_RG[rows_slice]
        if group is not None:
            spread = spread.repeat_interleave(group, -1)[:, :columns]
        weight_RK[rows_slice] = torch.addcmul(weight_RK[rows_slice].float(), noise, spread)
    return weight_NK


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


def normals(run: RowKeys, first_column: int, columns: int, device: torch.device) -> torch.Tensor:
    """Normal random numbers for the rows of a run, float32 [rows, columns].

    Columns 4c to 4c + 3 of row r use the four Philox4x32-10 words of the counter (c, low half of r,
    high half of r, 1) and the run's key: two words v and w give, by Box and Muller (1958), `sqrt(-2
    log u(v)) cos(2 pi u(w))` and the same with `sin`. `u` of a word is `word * 2^-32 + 2^-33`, in
    float32 like everything else: at least 2^-33, so that no logarithm is infinite and no number is
    beyond 6.8, and at most 1.
    """
    w0, w1, w2, w3 = words(run, first_column, columns, PURPOSE, device)
    drawn = *_two_normals(w0, w1), *_two_normals(w2, w3)
    return side_by_side(drawn, first_column, columns)


def _two_normals(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = (-2 * _uniform(first).log()).sqrt()
    angle = 2 * math.pi * _uniform(second)
    return size * angle.cos(), size * angle.sin()


def _uniform(uint32: torch.Tensor) -> torch.Tensor:
    return uint32.float() * 2**-32 + 2**-33
