"""Gated linear units, `activation(gate) * up`, on Triton without storing
the activation: SiLU (swiglu), GELU, and GELU with the tanh approximation (geglu).
"""

import torch

from penstock_kernels.glu import reference as _reference
from penstock_kernels.op import Op, needs_cuda, needs_floats, triton_backend

__all__ = ["geglu", "geglu_tanh", "packed_swiglu", "swiglu"]


def _unsupported_reason(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> str | None:
    if gate_TF.shape != up_TF.shape:
        return f"gate is {tuple(gate_TF.shape)} and up is {tuple(up_TF.shape)}"
    if gate_TF.dtype != up_TF.dtype:
        return f"gate is {gate_TF.dtype} and up is {up_TF.dtype}"
    return needs_floats(gate_TF) or needs_cuda(gate_TF, up_TF)


def _unsupported_packed(both_TF: torch.Tensor) -> str | None:
    if not both_TF.ndim or both_TF.shape[-1] % 2:
        return f"rows of {tuple(both_TF.shape)} have no two halves"
    return needs_floats(both_TF) or needs_cuda(both_TF)


swiglu = Op("swiglu", _reference.swiglu, triton_backend("glu.triton:swiglu", _unsupported_reason))
packed_swiglu = Op(
    "packed_swiglu",
    _reference.packed_swiglu,
    triton_backend("glu.triton:packed_swiglu", _unsupported_packed),
)
geglu = Op("geglu", _reference.geglu, triton_backend("glu.triton:geglu", _unsupported_reason))
geglu_tanh = Op(
    "geglu_tanh",
    _reference.geglu_tanh,
    triton_backend("glu.triton:geglu_tanh", _unsupported_reason),
)
