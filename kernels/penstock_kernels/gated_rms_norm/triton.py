"""gated_rms_norm on Triton: some rows of one group a program, and nothing but inputs and one number
a row saved.

With n = x / rms(x), w its weight and a the activated gate,  y = n w a; or with x a for x,  y = n w.
"""

# pyright: reportArgumentType=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import fake_like, keep_inputs, needed, operator
from penstock_kernels.gated_rms_norm.reference import Activation
from penstock_kernels.launch_sizes import cdiv
from penstock_kernels.rms_norm.triton import tile

MOST_PARTIALS = 512
"""Programs of a group in the backward pass, each with a sum of the weight's gradient."""


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    tokens,
    groups,
    D,
    eps,
    NORM_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    offs = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (offs < D)
    row = token.to(tl.int64) * groups + group
    row_offs = row[:, None] * D + offs
    x = tl.load(x_ptr + row_offs, mask=inside, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + row_offs, mask=inside, other=0).to(tl.float32)
    share = tl.sigmoid(gate)
    gated = gate * share if SILU else share
    if not NORM_FIRST:
        x *= gated
    mean = tl.sum(x * x, axis=1) / D + eps
    # Rows past the last are zeros: with an eps of 0 they would be divided by.
    scale = 1 / tl.sqrt(tl.where(token < tokens, mean, 1.0))
    tl.store(scale_ptr + row, scale, mask=token < tokens)
    weight = tl.load(weight_ptr + group * D + offs, mask=offs < D, other=0)
    # Rounded to y's dtype before the weight, as the reference does.
    y = (x * scale[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
    y *= weight.to(y_ptr.dtype.element_ty).to(tl.float32)
    if NORM_FIRST:
        y *= gated
    tl.store(y_ptr + row_offs, y, mask=inside)


@triton.jit(do_not_specialize=["tokens", "tokens_each"])
def _backward(
    x_ptr,
    gate_ptr,
    weight_ptr,
    dy_ptr,
    scale_ptr,
    dx_ptr,
    dgate_ptr,
    dweight_ptr,
    tokens,
    tokens_each,
    groups,
    D,
    NORM_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part, group = tl.program_id(0), tl.program_id(1)
    offs = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + group * D + offs, mask=offs < D, other=0)
    weight = weight.to(dx_ptr.dtype.element_ty).to(tl.float32)
    # Rows are added up once, after the loop.
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    end = tl.minimum((part + 1) * tokens_each, tokens)
    for first in range(part * tokens_each, end, ROWS):
        token = first + tl.arange(0, ROWS)
        inside = (token < end)[:, None] & (offs < D)
        row = token.to(tl.int64) * groups + group
        row_offs = row[:, None] * D + offs
        x = tl.load(x_ptr + row_offs, mask=inside, other=0).to(tl.float32)
        gate = tl.load(gate_ptr + row_offs, mask=inside, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row_offs, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=token < end, other=0)[:, None]
        share = tl.sigmoid(gate)
        gated = gate * share if SILU else share
        # The derivative of `gated`.
        rise = share + gated * (1 - share) if SILU else share * (1 - share)
        if NORM_FIRST:
            normed = x * scale
            dgate = dy * normed * weight * rise
            dy *= gated
        else:
            normed = x * gated * scale
        dweight += dy * normed
        weighted = dy * weight
        mean = tl.sum(weighted * normed, axis=1)[:, None] / D
        dx = (weighted - normed * mean) * scale
        if not NORM_FIRST:
            dgate = dx * x * rise
            dx *= gated
        tl.store(dx_ptr + row_offs, dx, mask=inside)
        tl.store(dgate_ptr + row_offs, dgate, mask=inside)
    tl.store(
        dweight_ptr + (part.to(tl.int64) * groups + group) * D + tl.arange(0, BLOCK),
        tl.sum(dweight, axis=0),
        mask=tl.arange(0, BLOCK) < D,
    )


def _run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    silu: bool,
    norm_first: bool,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    D = x.shape[-1] // groups
    tokens = x.numel() // x.shape[-1]
    y = x.new_empty(x.shape)
    scale = x.new_empty(tokens * groups, dtype=torch.float32)
    if tokens:
        launch = tile(D)
        _forward[(cdiv(tokens, launch["ROWS"]), groups)](
            *(x.contiguous(), gate.contiguous(), weight.contiguous(), y, scale),
            *(tokens, groups, D, eps),
            NORM_FIRST=norm_first,
            SILU=silu,
            **launch,
        )
    return y, scale


def _run_fake(x: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[:-1].numel() * options[-1]
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)


def _gradients(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    scale: torch.Tensor,
    silu: bool,
    norm_first: bool,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    D = x.shape[-1] // groups
    tokens = x.numel() // x.shape[-1]
    dx, dgate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    if not tokens:
        return dx, dgate, weight.new_zeros(weight.shape)
    launch = tile(D)
    # Whole tiles: the last of every part would be masked otherwise.
    tokens_each = cdiv(cdiv(tokens, MOST_PARTIALS), launch["ROWS"]) * launch["ROWS"]
    parts = cdiv(tokens, tokens_each)
    # A sum for each program, added up below: atomic additions would come in any order.
    dweight = x.new_empty(parts, groups * D, dtype=torch.float32)
    _backward[(parts, groups)](
        *(x.contiguous(), gate.contiguous(), weight.contiguous(), dy.contiguous(), scale),
        *(dx, dgate, dweight, tokens, tokens_each, groups, D),
        NORM_FIRST=norm_first,
        SILU=silu,
        **launch,
    )
    return dx, dgate, dweight.sum(0).to(weight.dtype)


_gradients_of = operator("gated_rms_norm_gradients", _gradients, fake=fake_like(0, 1, 2))


def _back(ctx: Any, dy: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    x, gate, weight, scale = ctx.saved_tensors
    return needed(ctx, _gradients_of(x, gate, weight, dy, scale, *ctx.options[1:]))


_norm_of = operator(
    "gated_rms_norm",
    _run,
    fake=_run_fake,
    # Nobody has a gradient of `scale`, and zeros of it would be a launch.
    keep=keep_inputs(3, 1, materialize_grads=False),
    backward=_back,
)


def gated_rms_norm(
    x_TD: torch.Tensor,
    gate_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    activation: Activation = "silu",
    norm_first: bool = True,
    groups: int = 1,
) -> torch.Tensor:
    """Same as the reference, with a fused backward."""
    y_TD, _ = _norm_of(x_TD, gate_TD, weight_D, eps, activation == "silu", norm_first, groups)
    return y_TD
