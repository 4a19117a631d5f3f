"""gpt-oss's clamped SwiGLU, with one added to the up projection; on Triton in one pass each way."""

from collections.abc import Mapping

import torch

from penstock_kernels.clamped_swiglu.reference import clamped_gate as _reference
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda, needs_floats

__all__ = ["clamped_gate"]


def _unsupported_reason(both_T2F: torch.Tensor, alpha: float, limit: float) -> str | None:
    del alpha
    if not both_T2F.ndim or both_T2F.shape[-1] % 2:
        return f"its input is {tuple(both_T2F.shape)}, which is not gate and up by turns"
    if limit < 0:
        return f"the limit is {limit}, and nothing lies between it and its negative"
    return needs_floats(both_T2F) or needs_cuda(both_T2F)


_FAST: Mapping[str, KernelImpl[[torch.Tensor, float, float], torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.clamped_swiglu.triton import clamped_gate as _triton

    _FAST = {"triton": KernelImpl(_triton, _unsupported_reason, language="triton")}

clamped_gate = Op("clamped_gate", _reference, _FAST)
