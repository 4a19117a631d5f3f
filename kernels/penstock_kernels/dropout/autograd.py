"""Dropout as autograd sees it: its gradient is dropped alike, by draws that are made once more."""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any

import torch

Drop = Callable[[torch.Tensor, torch.Tensor, float, int, int], torch.Tensor]
"""x [T, F], places [T], rate, key and first feature to what is left of x."""


class Dropout:
    """The operation made of one backend's `drop`."""

    def __init__(self, drop: Drop) -> None:
        self._drop = drop

    def __call__(
        self,
        x_TF: torch.Tensor,
        places_T: torch.Tensor,
        rate: float,
        key: int,
        first_feature: int = 0,
    ) -> torch.Tensor:
        """`x / (1 - rate)` where it is kept and 0 elsewhere, [T, F].

        `places_T` (int64) says of each token which one it is, and `key` (64 bits) of what the draws
        are besides; the same four always draw the same. `first_feature` is the number of x's first
        feature, where x is a run of the features of a wider one. Nothing but places is kept for the
        backward pass.
        """
        return _Dropped.apply(x_TF, places_T, rate, key, first_feature, self._drop)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TF: torch.Tensor,
        places_T: torch.Tensor,
        rate: float,
        key: int,
        first_feature: int,
        drop: Drop,
    ) -> torch.Tensor:
        ctx.save_for_backward(places_T)
        ctx.draws = rate, key, first_feature
        ctx.drop = drop
        return drop(x_TF, places_T, rate, key, first_feature)

    @staticmethod
    def backward(ctx: Any, dy_TF: torch.Tensor) -> tuple[Any, ...]:
        (places_T,) = ctx.saved_tensors
        return ctx.drop(dy_TF, places_T, *ctx.draws), None, None, None, None, None
