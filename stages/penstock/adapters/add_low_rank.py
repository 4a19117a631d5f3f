"""Adds low-rank products to columns of a matrix in place: `y += s h B^T`.

The addition is the GEMM's epilogue (`addmm_`). Separate additions, and the `cat` of the parts of a
fused projection, took a tenth of the kernel time of a LoRA step of Qwen3-8B on an H200.

T tokens, N features of a part, r the rank.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterable, Sequence
from typing import Any

import torch

Columns = Sequence[tuple[int, int]]
"""The first column and the number of columns of each part."""


def can_add_in_place(y: torch.Tensor, factors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether y is memory of its own, and all are in one dtype; a compiler fuses by itself."""
    return (
        not torch.compiler.is_compiling()
        # In a view, autograd would rebuild the history of its base for the write.
        and y._base is None
        and y.is_contiguous()
        and all(down.dtype == up.dtype == y.dtype for down, up in factors)
    )


class AddLowRank(torch.autograd.Function):
    """Of y [T, sum of N and others], s, the parts' columns, and for each part h [T, r] and
    B [N, r]: y with `s h B^T` added to its columns, rounded once."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, scale: float, columns: Columns, *factors: torch.Tensor
    ) -> torch.Tensor:
        ctx.mark_dirty(y)
        ctx.scale, ctx.columns = scale, columns
        ctx.save_for_backward(*factors)
        y_TN = y.view(-1, y.shape[-1])
        for (first, width), down, up in zip(columns, factors[::2], factors[1::2], strict=True):
            down_Tr = down.reshape(-1, down.shape[-1])
            y_TN.narrow(1, first, width).addmm_(down_Tr, up.mT, alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        factors, gradients = ctx.saved_tensors, []
        dy_TN = dy.reshape(-1, dy.shape[-1])
        for (first, width), down, up in zip(ctx.columns, factors[::2], factors[1::2], strict=True):
            part_TN = dy_TN.narrow(1, first, width)
            down_Tr = down.reshape(-1, down.shape[-1])
            gradients += [(part_TN @ up).mul_(ctx.scale).view_as(down)]
            gradients += [(part_TN.mT @ down_Tr).mul_(ctx.scale)]
        return dy, None, None, *gradients
