"""RMSNorm with a gate, before it or after it: of the outputs of linear attention and Mamba-2."""

import torch

from penstock_kernels.gated_rms_norm import lean as _lean
from penstock_kernels.gated_rms_norm.reference import Activation
from penstock_kernels.gated_rms_norm.reference import gated_rms_norm as _reference
from penstock_kernels.op import KernelImpl, Op, needs_cuda, needs_floats, triton_backend
from penstock_kernels.rms_norm import WIDEST

__all__ = ["Activation", "gated_rms_norm"]


def _mismatch(
    x_TD: torch.Tensor,
    gate_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    activation: Activation = "silu",
    norm_first: bool = True,
    groups: int = 1,
) -> str | None:
    del norm_first
    x, gate, weight = (tuple(tensor.shape) for tensor in (x_TD, gate_TD, weight_D))
    if not x or x != gate or weight != x[-1:] or not x[-1]:
        return f"x is {x}, its gate is {gate} and its weight is {weight}"
    if groups < 1 or x[-1] % groups:
        return f"rows are {x[-1]} wide, and there are {groups} groups"
    if activation not in ("silu", "sigmoid"):
        return f"its activation is {activation}, and it has silu and sigmoid"
    if eps < 0:
        return f"eps is {eps}, and the root of a negative number would be taken"
    return needs_floats(x_TD, gate_TD, weight_D)


def _unsupported_on_triton(
    x_TD: torch.Tensor,
    gate_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    activation: Activation = "silu",
    norm_first: bool = True,
    groups: int = 1,
) -> str | None:
    mismatch = _mismatch(x_TD, gate_TD, weight_D, eps, activation, norm_first, groups)
    if reason := needs_cuda(x_TD, gate_TD, weight_D) or mismatch:
        return reason
    if x_TD.shape[-1] // groups > WIDEST:
        return f"rows are {x_TD.shape[-1] // groups} wide, and it takes up to {WIDEST}"
    return None


gated_rms_norm = Op(
    "gated_rms_norm",
    _reference,
    {
        **triton_backend("gated_rms_norm.triton:gated_rms_norm", _unsupported_on_triton),
        "lean": KernelImpl(_lean.gated_rms_norm, _mismatch),
    },
)
