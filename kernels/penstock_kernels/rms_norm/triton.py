"""rms_norm on Triton: one program a row forward; backward sums the weight's gradient in two steps.

With n = x / rms(x), g = dy * weight:  dx = (g - n * mean(g * n)) / rms(x),  dweight = sum_T dy * n.
"""

# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
import triton
import triton.language as tl

MOST_PARTIALS = 256
"""Programs in the backward pass, each summing the weight's gradient over its share of the rows.
A fixed number of partial sums, added in one order, keeps the gradient the same from run to run."""


@triton.jit
def _forward(x_ptr, weight_ptr, y_ptr, scale_ptr, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    x = tl.load(x_ptr + row * D + at, mask=inside, other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(scale_ptr + row, scale)
    # Rounded to y's dtype before the weight, as the reference does.
    normed = (x * scale).to(y_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * D + at, normed * weight.to(tl.float32), mask=inside)


@triton.jit
def _backward(
    x_ptr,
    weight_ptr,
    dy_ptr,
    scale_ptr,
    dx_ptr,
    dweight_ptr,
    num_rows,
    rows_each,
    D,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    weight = tl.load(weight_ptr + at, mask=inside, other=0).to(dx_ptr.dtype.element_ty)
    weight = weight.to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(part * rows_each, tl.minimum((part + 1) * rows_each, num_rows)):
        x = tl.load(x_ptr + row * D + at, mask=inside, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row * D + at, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        normed = x * scale
        weighted = dy * weight
        mean = tl.sum(weighted * normed, axis=0) / D
        tl.store(dx_ptr + row * D + at, (weighted - normed * mean) * scale, mask=inside)
        dweight += dy * normed
    tl.store(dweight_ptr + part * D + at, dweight, mask=inside)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        x_TD, weight_D = x_TD.contiguous(), weight_D.contiguous()
        y_TD = torch.empty_like(x_TD)
        D = x_TD.shape[-1]
        rows = x_TD.numel() // D
        scale_T = torch.empty(rows, dtype=torch.float32, device=x_TD.device)
        if rows:
            block = triton.next_power_of_2(D)
            _forward[(rows,)](x_TD, weight_D, y_TD, scale_T, D, eps, BLOCK=block)
        ctx.save_for_backward(x_TD, weight_D, scale_T)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_TD, weight_D, scale_T = ctx.saved_tensors
        D = x_TD.shape[-1]
        rows = x_TD.numel() // D
        dx_TD = torch.empty_like(x_TD)
        if not rows:
            return dx_TD, torch.zeros_like(weight_D), None
        rows_each = triton.cdiv(rows, MOST_PARTIALS)
        parts = triton.cdiv(rows, rows_each)
        dweight_PD = torch.empty(parts, D, dtype=torch.float32, device=x_TD.device)
        _backward[(parts,)](
            x_TD,
            weight_D,
            dy_TD.contiguous(),
            scale_T,
            dx_TD,
            dweight_PD,
            rows,
            rows_each,
            D,
            BLOCK=triton.next_power_of_2(D),
        )
        return dx_TD, dweight_PD.sum(0).to(weight_D.dtype), None


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / rms(x) * weight` over the last dimension, with a fused backward."""
    return _RMSNorm.apply(x_TD, weight_D, eps)
