"""Definition of the passes over a chunk's logits; slow.

C tokens of a chunk, V entries of the vocabulary; in fp32, or fp64 where the logits are.
"""

import torch

from penstock_kernels.cross_entropy.loss_terms import LogitGradFactors, LossOptions, SoftmaxStats


def softmax_stats(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: LossOptions
) -> SoftmaxStats:
    """Statistics of each token's logits. A label of -1 is in another shard."""
    y_CV = capped(logits_CV, terms)
    target_C = y_CV.gather(1, labels_C.clamp(min=0)[:, None]).squeeze(1)
    return SoftmaxStats(
        y_CV.logsumexp(1),
        target_C.masked_fill(labels_C < 0, 0),
        y_CV.sum(1) if terms.smoothing else None,
    )


def logits_to_grad_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> None:
    """Replace logits by their gradient, in place.

    `log_sum_C` are those of these logits, as `softmax_stats` returns them.
    """
    y_CV = capped(logits_CV, terms)
    found_CV = (y_CV - log_sum_C[:, None]).exp() * slopes.share[:, None]
    if slopes.floor is not None:
        found_CV = found_CV - slopes.floor[:, None]
    at_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    found_CV = torch.where(at_V == labels_C[:, None], found_CV - slopes.hit[:, None], found_CV)
    if terms.soft_cap is not None:
        found_CV = found_CV * (1 - (y_CV / terms.soft_cap).square())
    logits_CV.copy_(found_CV)


def capped(logits_CV: torch.Tensor, terms: LossOptions) -> torch.Tensor:
    """The soft-capped logits in fp32 or fp64."""
    y_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if terms.soft_cap is None:
        return y_CV
    return (y_CV / terms.soft_cap).tanh() * terms.soft_cap
