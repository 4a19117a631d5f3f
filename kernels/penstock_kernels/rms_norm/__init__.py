"""Root-mean-square normalisation over the last dimension, with a learned scale."""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, Fast, Op, needs_cuda
from penstock_kernels.rms_norm.reference import rms_norm as _reference

__all__ = ["rms_norm"]

WIDEST = 65536
"""A row is held in one program's registers; wider ones would spill."""


def _refuses(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> str | None:
    if weight_D.shape != x_TD.shape[-1:]:
        return f"x is {tuple(x_TD.shape)} and its weight is {tuple(weight_D.shape)}"
    if x_TD.shape[-1] > WIDEST:
        return f"rows are {x_TD.shape[-1]} wide, and it takes up to {WIDEST}"
    if eps < 0:
        return f"eps is {eps}, and the root of a negative number would be taken"
    return needs_cuda(x_TD, weight_D)


_FAST: Mapping[str, Fast[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.rms_norm.triton import rms_norm as _triton

    _FAST = {"triton": Fast(_triton, _refuses, written_in="triton")}

rms_norm = Op("rms_norm", _reference, _FAST)
