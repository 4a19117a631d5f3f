"""gpt-oss's clamped SwiGLU, with one added to the up projection; on Triton in one pass each way."""

import torch

from penstock_kernels.clamped_swiglu.reference import clamped_gate as _reference
from penstock_kernels.op import Op, needs_cuda, needs_floats, triton_backend

__all__ = ["clamped_gate"]


def _unsupported_reason(both_T2F: torch.Tensor, alpha: float, limit: float) -> str | None:
    del alpha
    if not both_T2F.ndim or both_T2F.shape[-1] % 2:
        return f"its input is {tuple(both_T2F.shape)}, which is not gate and up by turns"
    if limit < 0:
        return f"the limit is {limit}, and nothing lies between it and its negative"
    return needs_floats(both_T2F) or needs_cuda(both_T2F)


_FAST = triton_backend("clamped_swiglu.triton:clamped_gate", _unsupported_reason)
clamped_gate = Op("clamped_gate", _reference, _FAST)
