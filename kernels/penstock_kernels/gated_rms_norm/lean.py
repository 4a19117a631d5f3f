"""gated_rms_norm with few PyTorch operations, and a custom gradient that saves only inputs."""

# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from penstock_kernels.gated_rms_norm.reference import Activation
from penstock_kernels.gated_rms_norm.reference import gated_rms_norm as _reference


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        gate_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        activation: Activation,
        norm_first: bool,
        groups: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_TD, gate_TD, weight_D)
        ctx.how = eps, activation, norm_first, groups
        return _reference(x_TD, gate_TD, weight_D, *ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, gate_TD, weight_D = ctx.saved_tensors
        eps, activation, norm_first, groups = ctx.how
        x, gate, slope = x_TD.float(), gate_TD.float(), dy_TD.float()
        # Rounded as the forward pass rounds it, or the gradient would be that of another weight.
        weight = weight_D.to(x_TD.dtype).float()
        # Computed again from the inputs, as by the reference: activations are not saved.
        share = gate.sigmoid()
        gated = gate * share if activation == "silu" else share
        normed = (x if norm_first else x * gated).unflatten(-1, (groups, -1))
        scale = torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
        normed = (normed * scale).flatten(-2)
        dgated = slope * normed * weight
        if norm_first:
            slope = slope * gated
        dweight_D = None
        if ctx.needs_input_grad[2]:
            dweight_D = (slope * normed).flatten(0, -2).sum(0).to(weight_D.dtype)
        parts, slopes = (tensor.unflatten(-1, (groups, -1)) for tensor in (normed, slope * weight))
        mean = (parts * slopes).mean(-1, keepdim=True)
        dx = slopes.addcmul_(parts, mean, value=-1).mul_(scale).flatten(-2)
        if not norm_first:
            dgated = dx * x
            dx = dx * gated
        # Of silu: share + gated * (1 - share); of sigmoid: share * (1 - share).
        rise = share.addcmul(gated, 1 - share) if activation == "silu" else share * (1 - share)
        dgate_TD = dgated.mul_(rise).to(gate_TD.dtype)
        return dx.to(x_TD.dtype), dgate_TD, dweight_D, None, None, None, None


def gated_rms_norm(
    x_TD: torch.Tensor,
    gate_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    activation: Activation = "silu",
    norm_first: bool = True,
    groups: int = 1,
) -> torch.Tensor:
    """Same as the reference."""
    return _GatedRMSNorm.apply(x_TD, gate_TD, weight_D, eps, activation, norm_first, groups)
