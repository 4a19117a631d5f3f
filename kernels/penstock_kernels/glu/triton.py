"""Gated linear units on Triton: one pass forward, one pass backward, activations recomputed instead
of saved.

An activation of g is g * s(g), with a sigmoid or a distribution function s.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import fake_like, keep_inputs, operator
from penstock_kernels.launch_sizes import cdiv
from penstock_kernels.spans import Spans, to_spans

BLOCK = 1024

SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)
"""Of the normal distribution: 1 / sqrt(2 pi)."""
# Twice sqrt(2 / pi), of the approximation; its tanh is a sigmoid of twice the argument.
TWICE_SLOPE_AT_0 = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def _share(gate, ACTIVATION: tl.constexpr):
    """s(g) and its derivative."""
    if ACTIVATION == "gelu":
        share = 0.5 * (1 + tl.erf(gate * SQRT_HALF))
        slope = tl.exp(-0.5 * gate * gate) * DENSITY_AT_0
    elif ACTIVATION == "gelu_tanh":
        square = gate * gate
        share = tl.sigmoid(gate * (square * CUBIC + 1) * TWICE_SLOPE_AT_0)
        slope = share * (1 - share) * (square * (3 * CUBIC) + 1) * TWICE_SLOPE_AT_0
    else:
        share = tl.sigmoid(gate)
        slope = share * (1 - share)
    return share, slope


@triton.jit
def _forward(
    gate_ptr,
    up_ptr,
    y_ptr,
    length,
    gate_stride,
    up_stride,
    blocks,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = (tl.program_id(0) // blocks).to(tl.int64)
    offs = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < length
    gate = tl.load(gate_ptr + span * gate_stride + offs, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + span * up_stride + offs, mask=inside, other=0).to(tl.float32)
    share, _ = _share(gate, ACTIVATION)
    tl.store(y_ptr + span * length + offs, gate * share * up, mask=inside)


@triton.jit
def _backward(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    length,
    gate_stride,
    up_stride,
    grad_stride,
    blocks,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = (tl.program_id(0) // blocks).to(tl.int64)
    offs = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < length
    grad_offs = span * grad_stride + offs
    gate = tl.load(gate_ptr + span * gate_stride + offs, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + span * up_stride + offs, mask=inside, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + span * length + offs, mask=inside, other=0).to(tl.float32)
    share, slope = _share(gate, ACTIVATION)
    # d (g s(g)) / dg = s(g) + g s'(g).
    tl.store(dgate_ptr + grad_offs, dy * up * (share + gate * slope), mask=inside)
    tl.store(dup_ptr + grad_offs, dy * gate * share, mask=inside)


def _glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    y = gate.new_empty(gate.shape)
    if y.numel():
        gates, ups = _alike(gate, up)
        blocks = cdiv(gates.length, BLOCK)
        sizes = gates.length, gates.stride, ups.stride, blocks
        _forward[(y.numel() // gates.length * blocks,)](
            gates.tensor, ups.tensor, y, *sizes, ACTIVATION=activation, BLOCK=BLOCK
        )
    return y


def _gradients(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if dgate.numel():
        gates, ups = _alike(gate, up)
        _write_gradients(gates, ups, dy, dgate, dup, gates.length, activation)
    return dgate, dup


def _write_gradients(
    gates: Spans,
    ups: Spans,
    dy: torch.Tensor,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    grad_stride: int,
    activation: str,
) -> None:
    """Into dgate and dup, whose spans begin grad_stride apart."""
    blocks = cdiv(gates.length, BLOCK)
    # dy may be expanded, as the gradient of a sum is, and the kernel reads its memory in order.
    tensors = gates.tensor, ups.tensor, dy.contiguous(), dgate, dup
    sizes = gates.length, gates.stride, ups.stride, grad_stride, blocks
    _backward[(dy.numel() // gates.length * blocks,)](
        *tensors, *sizes, ACTIVATION=activation, BLOCK=BLOCK
    )


def _alike(gate: torch.Tensor, up: torch.Tensor) -> tuple[Spans, Spans]:
    """Both, as spans of the same length."""
    # A program finds its span by one division, for gates and ups alike.
    gates, ups = to_spans(gate), to_spans(up)
    if gates.length == ups.length:
        return gates, ups
    return to_spans(gate.contiguous()), to_spans(up.contiguous())


_gradients_of = operator("glu_gradients", _gradients, fake=fake_like(0, 1))


def _back(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_gradients_of(*ctx.saved_tensors, dy, *ctx.options), None


_glu_of = operator("glu", _glu, fake=fake_like(0), keep=keep_inputs(2), backward=_back)


def glu(gate_TF: torch.Tensor, up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up with a fused backward; rounded once, from fp32."""
    return _glu_of(gate_TF, up_TF, activation)


swiglu, geglu, geglu_tanh = (
    partial(glu, activation=activation) for activation in ("silu", "gelu", "gelu_tanh")
)


def _packed(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.contiguous().chunk(2, dim=-1)
    return _glu(gate, up, activation)


def _packed_fake(gate_up: torch.Tensor, _: str) -> torch.Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _packed_gradients(gate_up: torch.Tensor, dy: torch.Tensor, activation: str) -> torch.Tensor:
    # One tensor for both halves: those of two tensors would be copied together.
    dboth, width = gate_up.new_empty(gate_up.shape), gate_up.shape[-1] // 2
    if dboth.numel():
        halves = gate_up.contiguous().chunk(2, dim=-1)
        gates, ups = (Spans(half, width, 2 * width) for half in halves)
        dgate, dup = dboth.chunk(2, dim=-1)
        _write_gradients(gates, ups, dy, dgate, dup, 2 * width, activation)
    return dboth


_packed_gradients_of = operator("packed_glu_gradients", _packed_gradients, fake=fake_like(0))


def _back_packed(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _packed_gradients_of(*ctx.saved_tensors, dy, *ctx.options), None


_packed_of = operator(
    "packed_glu", _packed, fake=_packed_fake, keep=keep_inputs(1), backward=_back_packed
)


def packed_swiglu(both_TF: torch.Tensor) -> torch.Tensor:
    """`swiglu` of the two halves of each row, [T, 2 F] to [T, F]."""
    return _packed_of(both_TF, "silu")
