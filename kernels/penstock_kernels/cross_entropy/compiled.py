"""The passes as `torch.compile` makes them of the reference: a loop or a kernel each.

It takes seconds the first time, and a C++ compiler on a CPU. What is compiled is given `data`: a
chunk is a view, and that its base had as many rows would be compiled in.
"""

from functools import cache
from typing import Any

import torch

from penstock_kernels.cross_entropy import reference
from penstock_kernels.cross_entropy.loss_terms import Slopes, Tally, Terms


def tally(logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: Terms) -> Tally:
    """As the reference."""
    return _made(terms)[0](logits_CV.data, labels_C)


def slope_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: Slopes,
    terms: Terms,
) -> None:
    """As the reference."""
    _made(terms)[1](logits_CV.data, labels_C, log_sum_C, *slopes)


@cache
def _made(terms: Terms) -> tuple[Any, Any]:
    def tally(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> Tally:
        return reference.tally(logits_CV, labels_C, terms)

    def slope_(
        logits_CV: torch.Tensor,
        labels_C: torch.Tensor,
        log_sum_C: torch.Tensor,
        share_C: torch.Tensor,
        hit_C: torch.Tensor,
        floor_C: torch.Tensor | None,
    ) -> None:
        slopes = Slopes(share_C, hit_C, floor_C)
        reference.slope_(logits_CV, labels_C, log_sum_C, slopes, terms)

    # The last chunk has fewer tokens than the others.
    return torch.compile(tally, dynamic=True), torch.compile(slope_, dynamic=True)
