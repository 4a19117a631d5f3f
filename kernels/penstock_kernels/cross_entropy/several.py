"""Passes over a chunk's logits for tokens with several labels each, such as a teacher's top-k
tokens.

The log-sum-exp is computed once for all labels of a token, by the passes for one label, with a
label of -1. C tokens of a chunk, K labels of each, V entries of the local vocabulary.
"""

import torch

from penstock_kernels.cross_entropy.loss_terms import LogitGradFactors, LossOptions, SoftmaxStats
from penstock_kernels.cross_entropy.passes import SlopeOf, TallyOf
from penstock_kernels.cross_entropy.reference import capped


def tally_by(
    tally: TallyOf, logits_CV: torch.Tensor, labels: torch.Tensor, terms: LossOptions
) -> SoftmaxStats:
    """A pass for labels [C], extended to labels [C, K] with a target for each, [C, K]. A label of
    -1 is not among the logits.
    """
    if labels.dim() == 1:
        return tally(logits_CV, labels, terms)
    stats = tally(logits_CV, _nowhere(labels), terms)
    own_CK = capped(logits_CV.gather(1, labels.clamp(min=0)), terms)
    return stats._replace(target=own_CK.masked_fill(labels < 0, 0))


def slope_by_(
    slope_: SlopeOf,
    logits_CV: torch.Tensor,
    labels: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> None:
    """A pass for labels [C], extended to labels [C, K] with a `hit` for each, [C, K]. Duplicate
    labels of a token count twice.
    """
    if labels.dim() == 1:
        slope_(logits_CV, labels, log_sum_C, slopes, terms)
        return
    at_CK, hit_CK = labels.clamp(min=0), slopes.hit.masked_fill(labels < 0, 0)
    if terms.soft_cap is not None:
        own_CK = capped(logits_CV.gather(1, at_CK), terms)
        hit_CK = hit_CK * (1 - (own_CK / terms.soft_cap).square())
    # No floor: several labels have no smoothing.
    shares = LogitGradFactors(slopes.share, torch.zeros_like(slopes.share), None)
    slope_(logits_CV, _nowhere(labels), log_sum_C, shares, terms)
    logits_CV.scatter_add_(1, at_CK, -hit_CK.to(logits_CV.dtype))


def _nowhere(labels_CK: torch.Tensor) -> torch.Tensor:
    return labels_CK.new_full(labels_CK.shape[:1], -1)
