"""Settings of an AdamW step, and their validation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock_kernels.rng_rows import RowKeys, require_rows

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
        """Factor of the weight in decoupled weight decay: 1 - lr * weight_decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """The learning rate with the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def bias_correction2_sqrt(self) -> float:
        """Bias correction of the square root of the second moment."""
        return math.sqrt(1 - self.beta2**self.step)


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
    for tensor in (
        weight,
        *(tensor_or_none for tensor_or_none in tensors if tensor_or_none is not None),
    ):
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
