"""SwiGLU's elementwise half: `silu(gate) * up`, on Triton without storing the silu."""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, Fast, Op, needs_cuda
from penstock_kernels.swiglu.reference import swiglu as _reference

__all__ = ["swiglu"]


def _refuses(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> str | None:
    if gate_TF.shape != up_TF.shape:
        return f"gate is {tuple(gate_TF.shape)} and up is {tuple(up_TF.shape)}"
    if gate_TF.dtype != up_TF.dtype:
        return f"gate is {gate_TF.dtype} and up is {up_TF.dtype}"
    return needs_cuda(gate_TF, up_TF)


_FAST: Mapping[str, Fast[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.swiglu.triton import swiglu as _triton

    _FAST = {"triton": Fast(_triton, _refuses, written_in="triton")}

swiglu = Op("swiglu", _reference, _FAST)
