"""MoE routing: the top-k experts of each token, and their weights."""

from typing import Any

import torch

from penstock_kernels.op import Op, needs_cuda, needs_floats, triton_backend
from penstock_kernels.route.reference import route as _route

__all__ = ["route"]

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


route = Op(
    "route",
    _route,
    triton_backend("route.triton:route", _unsupported_reason),
    reference_name="eager",
)
