"""clamped_gate on Triton: one pass forward, one pass backward, which save only the input."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import fake_like, keep_inputs, operator
from penstock_kernels.launch_sizes import cdiv

BLOCK = 1024


@triton.jit
def _read(both_ptr, n, BLOCK: tl.constexpr):
    """Gate and up, unclamped."""
    # They are interleaved: whole vectors are read, which each thread splits.
    offs = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    # Not `offs < 2 * n`: n is int32, and its double overflows.
    gate_up = tl.load(both_ptr + offs, mask=offs // 2 < n, other=0).to(tl.float32)
    return tl.split(gate_up.reshape(BLOCK, 2))


@triton.jit
def _forward(both_ptr, y_ptr, alpha, limit, n, BLOCK: tl.constexpr):
    gate, up = _read(both_ptr, n, BLOCK)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # gpt-oss adds 1 to the up half: at 0 the gate alone passes.
    tl.store(y_ptr + offs, (up + 1) * gate * tl.sigmoid(alpha * gate), mask=offs < n)


@triton.jit
def _backward(both_ptr, dy_ptr, dboth_ptr, alpha, limit, n, BLOCK: tl.constexpr):
    gate, up = _read(both_ptr, n, BLOCK)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + offs, mask=offs < n, other=0).to(tl.float32)
    # At the limits gradients pass, as in torch.clamp.
    gate_passes = gate <= limit
    up_passes = (up >= -limit) & (up <= limit)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    sig = tl.sigmoid(alpha * gate)
    # d (g * s(a g)) / dg = s + a * g * s * (1 - s)
    dgate = dy * (up + 1) * sig * (1 + alpha * gate * (1 - sig))
    dgate = tl.where(gate_passes, dgate, 0)
    dup = tl.where(up_passes, dy * gate * sig, 0)
    both_at = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(dboth_ptr + both_at, tl.interleave(dgate, dup), mask=both_at // 2 < n)


def _clamped_gate(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    y = _clamped_gate_fake(gate_up)
    if n := y.numel():
        _forward[(cdiv(n, BLOCK),)](gate_up.contiguous(), y, alpha, limit, n, BLOCK=BLOCK)
    return y


def _clamped_gate_fake(gate_up: torch.Tensor, *_: Any) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _gradient(gate_up: torch.Tensor, dy: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    dboth = gate_up.new_empty(gate_up.shape)
    if n := dy.numel():
        _backward[(cdiv(n, BLOCK),)](
            gate_up.contiguous(), dy.contiguous(), dboth, alpha, limit, n, BLOCK=BLOCK
        )
    return dboth


_gradient_of = operator("clamped_gate_gradient", _gradient, fake=fake_like(0))


def _back(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _gradient_of(*ctx.saved_tensors, dy, *ctx.options), None, None


_clamped_gate_of = operator(
    "clamped_gate", _clamped_gate, fake=_clamped_gate_fake, keep=keep_inputs(1), backward=_back
)


def clamped_gate(both_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Same as the reference; rounded once, from fp32."""
    return _clamped_gate_of(both_T2F, alpha, limit)
