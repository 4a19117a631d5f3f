"""Gated linear units, `activation(gate) * up`, on Triton without storing
the activation: SiLU (swiglu), GELU, and GELU with the tanh approximation (geglu).
"""

from collections.abc import Mapping
from functools import partial

import torch

from penstock_kernels.glu import reference as _reference
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda, needs_floats

__all__ = ["geglu", "geglu_tanh", "packed_swiglu", "swiglu"]


def _unsupported_reason(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> str | None:
    if gate_TF.shape != up_TF.shape:
        return f"gate is {tuple(gate_TF.shape)} and up is {tuple(up_TF.shape)}"
    if gate_TF.dtype != up_TF.dtype:
        return f"gate is {gate_TF.dtype} and up is {up_TF.dtype}"
    return needs_floats(gate_TF) or needs_cuda(gate_TF, up_TF)


def _fast(activation: str) -> Mapping[str, KernelImpl[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    if not HAS_TRITON:
        return {}
    from penstock_kernels.glu.triton import glu  # noqa: PLC0415 - published for Linux alone

    return {
        "triton": KernelImpl(
            partial(glu, activation=activation), _unsupported_reason, language="triton"
        )
    }


def _unsupported_packed(both_TF: torch.Tensor) -> str | None:
    if not both_TF.ndim or both_TF.shape[-1] % 2:
        return f"rows of {tuple(both_TF.shape)} have no two halves"
    return needs_floats(both_TF) or needs_cuda(both_TF)


_PACKED: Mapping[str, KernelImpl[[torch.Tensor], torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.glu.triton import packed_glu

    _PACKED = {
        "triton": KernelImpl(
            partial(packed_glu, activation="silu"), _unsupported_packed, language="triton"
        )
    }

swiglu = Op("swiglu", _reference.swiglu, _fast("silu"))
packed_swiglu = Op("packed_swiglu", _reference.packed_swiglu, _PACKED)
geglu = Op("geglu", _reference.geglu, _fast("gelu"))
geglu_tanh = Op("geglu_tanh", _reference.geglu_tanh, _fast("gelu_tanh"))
