"""Attention of the newest tokens of sequences to their keys and values in a paged KV cache. No
gradients."""

import torch

from penstock_kernels.attention.paged import reference as _reference
from penstock_kernels.attention.paged import runs as _runs
from penstock_kernels.attention.paged.pages import PagedSequences
from penstock_kernels.op import KernelImpl, Op, needs_cuda, needs_floats, triton_backend

__all__ = ["PagedSequences", "paged_attention"]


def _unsupported_reason(
    q_TNH: torch.Tensor,
    k_PSKH: torch.Tensor,
    v_PSKH: torch.Tensor,
    sequences: PagedSequences,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> str | None:
    del sequences, scale, window, sinks_N, soft_cap
    return needs_cuda(q_TNH, k_PSKH, v_PSKH) or needs_floats(q_TNH, k_PSKH, v_PSKH)


paged_attention: Op[..., torch.Tensor] = Op(
    "paged_attention",
    _reference.paged_attention,
    {
        **triton_backend("attention.paged.triton:paged_attention", _unsupported_reason),
        "runs": KernelImpl(_runs.paged_attention, _runs.unsupported_reason),
    },
)
