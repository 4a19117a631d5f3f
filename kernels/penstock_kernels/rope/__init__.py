"""Rotary position embedding, applied to queries and keys together."""

import torch

from penstock_kernels.op import KernelImpl, Op, needs_cuda, needs_floats, triton_backend
from penstock_kernels.rope import lean as _lean
from penstock_kernels.rope.reference import Pairs
from penstock_kernels.rope.reference import rope as _reference

__all__ = ["Pairs", "rope"]


def _unsupported_reason(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    pairs: Pairs = "halves",
) -> str | None:
    del pairs
    q, k, cos, sin = (x.shape for x in (q_TNH, k_TKH, cos_TR, sin_TR))
    ranks = len(q), len(k), len(cos), len(sin)
    if ranks != (3, 3, 2, 2) or cos != sin or q[0] != cos[0] or k[0] != cos[0]:
        return f"q is {tuple(q)}, k is {tuple(k)}, cos is {tuple(cos)} and sin is {tuple(sin)}"
    if q[2] != k[2] or cos[1] % 2 or not 0 < cos[1] <= q[2]:
        return f"{cos[1]} features are to turn of heads {q[2]} and {k[2]} wide"
    if q_TNH.dtype != k_TKH.dtype:
        return f"q is {q_TNH.dtype} and k is {k_TKH.dtype}"
    if cos_TR.requires_grad or sin_TR.requires_grad:
        return "angles are to learn, and it has no gradient for them"
    return needs_floats(q_TNH, cos_TR, sin_TR) or needs_cuda(q_TNH, k_TKH, cos_TR, sin_TR)


rope = Op(
    "rope",
    _reference,
    {
        **triton_backend("rope.triton:rope", _unsupported_reason),
        "lean": KernelImpl(_lean.rope, _lean.unsupported_reason),
    },
)
