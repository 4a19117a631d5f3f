"""Attention as a single block: for cases that a backend's own function does not support but its
block does, or that need the log-sum-exp; and on a CPU as one custom operator, for torch.compile.

T tokens, N query heads, K key/value heads, H head width.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from penstock_kernels.attention.block import sdpa
from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.attention.sinks import gradient_of_sinks, with_sinks
from penstock_kernels.custom_op import fake_like, keep_inputs, operator


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


# All layers of a pass have the same documents, whose layout is found once.
@lru_cache(maxsize=8)
def _documents(lengths: tuple[int, ...]) -> VarlenMetadata:
    return VarlenMetadata.of(lengths)


def _segments(
    cu_seqlens: torch.Tensor, start_rows_T: torch.Tensor | None, run_ends_T: torch.Tensor | None
) -> VarlenMetadata:
    # On a CPU reading values waits for no device.
    documents = _documents(tuple(cu_seqlens.diff().tolist()))
    # A memo of its own: documents of the same lengths may have other masks.
    return replace(documents, start_rows=start_rows_T, run_ends=run_ends_T, memo={})


def _forward(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    sinks_N: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    start_rows_T: torch.Tensor | None,
    run_ends_T: torch.Tensor | None,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    segments = _segments(cu_seqlens, start_rows_T, run_ends_T)
    y_TNH, lse_TN = sdpa.block(q_TNH, k_TKH, v_TKH, segments, scale, window)
    if sinks_N is not None:
        y_TNH, lse_TN = with_sinks(y_TNH, lse_TN, sinks_N)
    # As results of the fake implementation are; PyTorch's kernels have heads before tokens.
    return y_TNH.contiguous(), lse_TN.contiguous()


def _fake(q_TNH: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(q_TNH.shape[:2], dtype=wide)


def _backward(
    dy_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    y_TNH: torch.Tensor,
    lse_TN: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_rows_T: torch.Tensor | None,
    run_ends_T: torch.Tensor | None,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    segments = _segments(cu_seqlens, start_rows_T, run_ends_T)
    dq, dk, dv = sdpa.block_backward(
        dy_TNH, q_TNH, k_TKH, v_TKH, y_TNH, lse_TN, segments, scale, window
    )
    # In the strides of the operator's fake kernel, which compiled code relies on.
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


_operator_backward = operator("packed_attention_backward", _backward, fake=fake_like(1, 2, 3))


def _gradients(ctx: Any, dy_TNH: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    q_TNH, k_TKH, v_TKH, sinks_N, *documents, y_TNH, lse_TN = ctx.saved_tensors
    inputs = q_TNH, k_TKH, v_TKH, y_TNH, lse_TN, *documents
    dq_TNH, dk_TKH, dv_TKH = _operator_backward(dy_TNH, *inputs, *ctx.options)
    dsinks_N = None
    if sinks_N is not None and ctx.needs_input_grad[3]:
        dsinks_N = gradient_of_sinks(dy_TNH, y_TNH, lse_TN, sinks_N)
    return dq_TNH, dk_TKH, dv_TKH, dsinks_N, *[None] * 5


_operator = operator(
    "packed_attention", _forward, fake=_fake, keep=keep_inputs(7, 0, 1), backward=_gradients
)


def traced(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """Same as `attend` with PyTorch's fused kernels on a CPU, as a custom operator.

    The compiler specializes on sizes, and document lengths differ in each micro-batch: here
    boundaries, start rows and run ends are values of tensors, which the compiler does not inspect,
    and buckets are formed at run time.
    """
    documents = segments.cu_seqlens, segments.start_rows, segments.run_ends
    y_TNH, _ = _operator(q_TNH, k_TKH, v_TKH, sinks_N, *documents, scale, window)
    return y_TNH
