"""Attention as a single block: for cases that a backend's own function does not support but its
block does, or that need the log-sum-exp.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.attention.sinks import gradient_of_sinks, with_sinks


class Block(NamedTuple):
    """Forward and backward of one backend of `block`."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def attend(
    block: Block,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """Attention by block, with gradients. Returns [T, N, H]."""
    # Autocast would cast deliberate fp32 operations down.
    with torch.autocast(q_TNH.device.type, enabled=False):
        return _OneBlock.apply(q_TNH, k_TKH, v_TKH, sinks_N, segments, scale, window, block)


class _OneBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        sinks_N: torch.Tensor | None,
        segments: VarlenMetadata,
        scale: float,
        window: int | None,
        block: Block,
    ) -> torch.Tensor:
        y_TNH, lse_TN = block.forward(q_TNH, k_TKH, v_TKH, segments, scale, window)
        if sinks_N is not None:
            y_TNH, lse_TN = with_sinks(y_TNH, lse_TN, sinks_N)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, sinks_N, y_TNH, lse_TN)
        ctx.segments, ctx.scale, ctx.window, ctx.block = segments, scale, window, block
        return y_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TNH: torch.Tensor) -> tuple[Any, ...]:
        q_TNH, k_TKH, v_TKH, sinks_N, y_TNH, lse_TN = ctx.saved_tensors
        dq_TNH, dk_TKH, dv_TKH = ctx.block.backward(
            dy_TNH, q_TNH, k_TKH, v_TKH, y_TNH, lse_TN, ctx.segments, ctx.scale, ctx.window
        )
        dsinks_N = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            dsinks_N = gradient_of_sinks(dy_TNH, y_TNH, lse_TN, sinks_N)
        return dq_TNH, dk_TKH, dv_TKH, dsinks_N, None, None, None, None
