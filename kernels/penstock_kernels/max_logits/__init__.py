"""The largest attention logit of each query head, for QK-clip (Kimi K2, arXiv 2507.20534)."""

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.max_logits.reference import max_logits as _reference
from penstock_kernels.op import Op, needs_cuda, needs_floats, triton_backend

__all__ = ["max_logits"]


def _unsupported_reason(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
) -> str | None:
    del scale
    if segments.start_rows is not None and window is not None:
        return "start rows and a window hide keys together"
    if segments.run_ends is not None:
        return "runs of tokens are bidirectional"
    return needs_cuda(q_TNH, k_TKH) or needs_floats(q_TNH, k_TKH)


_FAST = triton_backend("max_logits.triton:max_logits", _unsupported_reason)
max_logits: Op[..., torch.Tensor] = Op("max_logits", _reference, _FAST)
