"""MoE routing: the top-k experts of each token, and their weights."""

from typing import Any

import torch

from penstock_kernels.op import Op, needs_cuda, needs_floats, triton_backend
from penstock_kernels.route.reference import route as _route
from penstock_kernels.route.reference import route_stats as _route_stats
from penstock_kernels.route.reference import row_mask, score_shares, sum_by_row

__all__ = ["route", "route_stats", "row_mask", "score_shares", "sum_by_row"]

MOST_EXPERTS = 2048
"""Of which a program holds all scores of a token."""


def _unsupported_reason(
    logits_TE: torch.Tensor,
    experts_per_token: int,
    *,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    **_: Any,
) -> str | None:
    if logits_TE.dim() != 2 or experts_per_token > logits_TE.shape[1]:
        return f"logits are {tuple(logits_TE.shape)}, to choose {experts_per_token} experts"
    if logits_TE.shape[1] % num_groups or logits_TE.shape[1] > MOST_EXPERTS:
        return f"{logits_TE.shape[1]} experts are in {num_groups} groups; {MOST_EXPERTS} fit"
    tensors = (logits_TE,) if bias_E is None else (logits_TE, bias_E)
    return needs_floats(*tensors) or needs_cuda(*tensors)


def _unsupported_stats(
    logits_TE: torch.Tensor, choice_TK: torch.Tensor, row_T: torch.Tensor, *_: Any, **__: Any
) -> str | None:
    if torch.is_grad_enabled() and logits_TE.requires_grad:
        return "logits need a gradient, and it has none"
    if logits_TE.dim() != 2 or logits_TE.shape[1] > MOST_EXPERTS:
        return f"logits are {tuple(logits_TE.shape)}, and {MOST_EXPERTS} experts fit"
    return needs_floats(logits_TE) or needs_cuda(logits_TE, choice_TK, row_T)


route = Op(
    "route",
    _route,
    triton_backend("route.triton:route", _unsupported_reason),
    reference_name="eager",
)
route_stats = Op(
    "route_stats",
    _route_stats,
    triton_backend("route.triton:route_stats", _unsupported_stats),
    reference_name="eager",
)
"""Statistics of routers, with gradients where an auxiliary loss needs them."""
