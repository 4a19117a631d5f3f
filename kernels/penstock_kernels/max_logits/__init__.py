"""The largest attention logit of each query head, for QK-clip (Kimi K2, arXiv 2507.20534)."""

from collections.abc import Mapping

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.max_logits.reference import max_logits as _reference
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda, needs_floats

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


_FAST: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.max_logits.triton import max_logits as _triton

    _FAST = {"triton": KernelImpl(_triton, _unsupported_reason, language="triton")}

max_logits: Op[..., torch.Tensor] = Op("max_logits", _reference, _FAST)
