"""Definition of an AdamW step, also with weights and states in bfloat16.

R rows of all matrices, K columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock_kernels.rng_rows import RowKeys, blocks, require_rows
from penstock_kernels.stochastic_rounding.reference import LOW, random_words, rounded

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """From 1."""

    @property
    def decay_factor(self) -> float:
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def bias_correction2_sqrt(self) -> float:
        return math.sqrt(1 - self.beta2**self.step)


def adamw_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    settings: Settings,
    runs: Sequence[RowKeys] | None = None,
    first_column: int = 0,
    lost: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """One step (Loshchilov and Hutter 2019, algorithm 2, with decay multiplied by the learning
    rate).

    All are [..., N, K], each in float32 or bfloat16; `weight`, the moments `first` and `second` and
    `lost` are changed in place. Everything is computed in float32, and bfloat16 results are rounded
    once:

    - the weight stochastically, or with `lost` to nearest: then `lost` stores the rounding error
      and adds it in the next step (Kahan 1965);
    - the second moment stochastically, since near 1 `beta2` changes it by less than half a unit;
    - the first moment to nearest.

    Random numbers are those of `stochastic_round`: the low half of an element's word is for the
    weight, the high half for the second moment. Without `runs` everything is rounded to nearest.
    `table`: the runs on the weight's device (`copy_tables`), for kernels; they copy them there
    otherwise.

    Raises:
        ValueError: the arguments do not fit together.
    """
    del table
    require_step(weight, (gradient, first, second, lost), settings, runs, first_column)
    columns = weight.shape[-1]
    rows = math.prod(weight.shape[:-1])
    # Views, so that writes change the originals.
    weight_RK, gradient_RK, first_RK, second_RK = (
        tensor.view(rows, columns) for tensor in (weight, gradient, first, second)
    )
    lost_RK = None if lost is None else lost.view(rows, columns)
    for rows_slice, run in blocks([RowKeys(rows, 0)] if runs is None else runs, columns):
        drawn = None
        if runs is not None:
            drawn = random_words(run, first_column, columns, weight.device)
        g = gradient_RK[rows_slice].float()
        m = first_RK[rows_slice].float()
        # In the order of `lerp`, by which torch.optim.AdamW computes it.
        m = m + (g - m) * (1 - settings.beta1)
        v = second_RK[rows_slice].float() * settings.beta2 + g * g * (1 - settings.beta2)
        # eps is added to the corrected root, as in the paper and torch.optim.AdamW.
        update = m / (v.sqrt() / settings.bias_correction2_sqrt + settings.eps)
        w = weight_RK[rows_slice].float()
        if lost_RK is not None:
            w = w + lost_RK[rows_slice].float()
        w = w * settings.decay_factor - update * settings.step_size
        first_RK[rows_slice] = m
        second_RK[rows_slice] = _as(second.dtype, v, None if drawn is None else drawn >> 16)
        if lost_RK is None:
            weight_RK[rows_slice] = _as(weight.dtype, w, None if drawn is None else drawn & LOW)
        else:
            weight_RK[rows_slice] = w
            # Read back, because the assignment above rounded it.
            lost_RK[rows_slice] = w - weight_RK[rows_slice].float()


def _as(dtype: torch.dtype, x: torch.Tensor, drawn: torch.Tensor | None) -> torch.Tensor:
    return x if dtype == torch.float32 or drawn is None else rounded(x, drawn)


def require_step(
    weight: torch.Tensor,
    tensors: Sequence[torch.Tensor | None],
    settings: Settings,
    runs: Sequence[RowKeys] | None,
    first_column: int,
) -> None:
    """Validate a step: `tensors` are all tensors that must be like the weight.

    Raises:
        ValueError: their shapes differ, one is not contiguous or neither in float32 nor bfloat16,
            runs are not the rows, or the step is not counted from 1.
    """
    if weight.ndim < 2:
        raise ValueError(f"the weight is {tuple(weight.shape)}; it must have rows and columns")
    for tensor in (weight, *tensors):
        if tensor is None:
            continue
        if tensor.shape != weight.shape:
            raise ValueError(f"{tuple(tensor.shape)} beside a weight of {tuple(weight.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"a tensor is in {tensor.dtype}, and not float32 or bfloat16")
        if not tensor.is_contiguous():
            raise ValueError("a tensor is not contiguous, and is written to as if it were")
    if settings.step < 1:
        raise ValueError(f"step {settings.step} is none: steps are counted from 1")
    if runs is not None:
        require_rows(weight.shape, runs, first_column)
