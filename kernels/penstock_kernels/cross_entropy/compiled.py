"""The passes as compiled by `torch.compile` from the reference: a loop or a kernel each.

Compilation takes seconds, and a C++ compiler on a CPU. Compiled functions get `data`: a chunk is a
view, and the number of rows of its base would be compiled in.
"""

from functools import cache
from typing import Any

import torch

from penstock_kernels.cross_entropy import reference
from penstock_kernels.cross_entropy.loss_terms import LogitGradFactors, LossOptions, SoftmaxStats


def softmax_stats(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: LossOptions
) -> SoftmaxStats:
    """Same as the reference."""
    return _made(terms)[0](logits_CV.data, labels_C)


def logits_to_grad_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> None:
    """Same as the reference."""
    _made(terms)[1](logits_CV.data, labels_C, log_sum_C, *slopes)


@cache
def _made(terms: LossOptions) -> tuple[Any, Any]:
    def tally(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> SoftmaxStats:
        return reference.softmax_stats(logits_CV, labels_C, terms)

    def slope_(
        logits_CV: torch.Tensor,
        labels_C: torch.Tensor,
        log_sum_C: torch.Tensor,
        share_C: torch.Tensor,
        hit_C: torch.Tensor,
        floor_C: torch.Tensor | None,
    ) -> None:
        slopes = LogitGradFactors(share_C, hit_C, floor_C)
        reference.logits_to_grad_(logits_CV, labels_C, log_sum_C, slopes, terms)

    # The last chunk has fewer tokens than the others.
    return torch.compile(tally, dynamic=True), torch.compile(slope_, dynamic=True)
