"""swiglu on Triton: one pass forward, one pass backward, silu recomputed rather than kept."""

# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(gate_ptr + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0).to(tl.float32)
    tl.store(y_ptr + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _backward(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(gate_ptr + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0).to(tl.float32)
    sig = tl.sigmoid(gate)
    # d silu(g)/dg = s + g * s * (1 - s), with s = sigmoid(g)
    tl.store(dgate_ptr + at, dy * up * sig * (1 + gate * (1 - sig)), mask=inside)
    tl.store(dup_ptr + at, dy * gate * sig, mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
        y_TF = torch.empty_like(gate_TF)
        n = y_TF.numel()
        if n:
            _forward[(triton.cdiv(n, BLOCK),)](gate_TF, up_TF, y_TF, n, BLOCK=BLOCK)
        ctx.save_for_backward(gate_TF, up_TF)
        return y_TF

    @staticmethod
    def backward(ctx: Any, dy_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_TF, up_TF = ctx.saved_tensors
        dgate_TF, dup_TF = torch.empty_like(gate_TF), torch.empty_like(up_TF)
        n = gate_TF.numel()
        if n:
            _backward[(triton.cdiv(n, BLOCK),)](
                gate_TF, up_TF, dy_TF.contiguous(), dgate_TF, dup_TF, n, BLOCK=BLOCK
            )
        return dgate_TF, dup_TF


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` with a fused backward; rounded once, from fp32."""
    return _SwiGLU.apply(gate_TF, up_TF)
