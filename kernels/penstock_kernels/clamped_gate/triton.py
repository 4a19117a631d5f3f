"""clamped_gate on Triton: one pass forward, one pass backward, which keep the input alone."""

# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _forward(both_ptr, y_ptr, alpha, limit, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(both_ptr + 2 * at, mask=inside, other=0).to(tl.float32)
    up = tl.load(both_ptr + 2 * at + 1, mask=inside, other=0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(y_ptr + at, (up + 1) * gate * tl.sigmoid(alpha * gate), mask=inside)


@triton.jit
def _backward(both_ptr, dy_ptr, dboth_ptr, alpha, limit, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(both_ptr + 2 * at, mask=inside, other=0).to(tl.float32)
    up = tl.load(both_ptr + 2 * at + 1, mask=inside, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0).to(tl.float32)
    # At the limits themselves gradients pass, as torch.clamp has it.
    gate_passes = gate <= limit
    up_passes = (up >= -limit) & (up <= limit)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    sig = tl.sigmoid(alpha * gate)
    # d (g * s(a g)) / dg = s + a * g * s * (1 - s)
    dgate = dy * (up + 1) * sig * (1 + alpha * gate * (1 - sig))
    tl.store(dboth_ptr + 2 * at, tl.where(gate_passes, dgate, 0), mask=inside)
    tl.store(dboth_ptr + 2 * at + 1, tl.where(up_passes, dy * gate * sig, 0), mask=inside)


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        both_T2F = both_T2F.contiguous()
        y_TF = both_T2F.new_empty((*both_T2F.shape[:-1], both_T2F.shape[-1] // 2))
        if n := y_TF.numel():
            _forward[(triton.cdiv(n, BLOCK),)](both_T2F, y_TF, alpha, limit, n, BLOCK=BLOCK)
        ctx.save_for_backward(both_T2F)
        ctx.alpha, ctx.limit = alpha, limit
        return y_TF

    @staticmethod
    def backward(ctx: Any, dy_TF: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (both_T2F,) = ctx.saved_tensors
        dboth_T2F = torch.empty_like(both_T2F)
        if n := dy_TF.numel():
            _backward[(triton.cdiv(n, BLOCK),)](
                both_T2F, dy_TF.contiguous(), dboth_T2F, ctx.alpha, ctx.limit, n, BLOCK=BLOCK
            )
        return dboth_T2F, None, None


def clamped_gate(both_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """As the reference's; rounded once, from fp32."""
    return _ClampedGate.apply(both_T2F, alpha, limit)
