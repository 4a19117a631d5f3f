"""Terms of the loss, and the statistics of each token from which the loss and its gradient follow.

With logits y of a token, V of them, and its label l the loss is

    log_sum - (1 - smoothing) y_l - smoothing mean(y) + z log_sum^2,    log_sum = log sum_v exp(y_v)

where y may be soft-capped: y = cap tanh(x / cap) of the head's output x. Smoothing is as in
`torch.nn.functional.cross_entropy` (Szegedy et al. 2016, section 7), and the last term the z-loss
(Chowdhery et al. 2022, "PaLM", section 5).

C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class LossOptions:
    """Options of the cross-entropy: label smoothing, z-loss, soft cap."""

    smoothing: float = 0.0
    """Label smoothing: the fraction of each target that is uniform over the vocabulary."""
    z: float = 0.0
    """Coefficient of the squared log-sum-exp."""
    soft_cap: float | None = None
    """Soft cap of the logits."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing is {self.smoothing}; it is a share, from 0 to below 1")
        if self.z < 0:
            raise ValueError(f"z is {self.z}; below 0 logits would be driven apart")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap is {self.soft_cap}; logits have to be allowed some range")


PLAIN = LossOptions()
"""Plain cross-entropy."""


class SoftmaxStats(NamedTuple):
    """Statistics of each token's logits that the loss needs, [C] each, in fp32 or wider. The target
    of tokens with K labels each is [C, K].
    """

    log_sum: torch.Tensor
    """The log-sum-exp."""
    target: torch.Tensor
    """The label's logit, or 0 if the label is not local."""
    total: torch.Tensor | None
    """The sum of the logits, with label smoothing."""


class LogitGradFactors(NamedTuple):
    """Factors of the gradient of a token's logits, [C] each: `share * softmax - floor`
    of the local logits, minus `hit` for the label's; with K labels `hit` is [C, K].
    """

    share: torch.Tensor
    hit: torch.Tensor
    floor: torch.Tensor | None


@dataclass(frozen=True)
class VocabShard:
    """The local shard of a vocabulary."""

    first: int
    """Index of the first local entry."""
    size: int
    """Size of the whole vocabulary."""
    widest: int
    """Size of the largest shard: all ranks use the same chunk size."""
    merge: Callable[[SoftmaxStats], SoftmaxStats]
    """From the tally of the entries here to that of all; called by all holders, in one order."""


def losses(tally: SoftmaxStats, vocab_size: int, terms: LossOptions) -> torch.Tensor:
    """The loss of each token, [C]; of each of its labels, [C, K], where it has several."""
    # `_require_plain` refuses the other terms for several labels.
    if tally.target.dim() > 1:
        return tally.log_sum[:, None] - tally.target
    loss = tally.log_sum - (1 - terms.smoothing) * tally.target
    if tally.total is not None:
        loss = loss - terms.smoothing / vocab_size * tally.total
    return loss + terms.z * tally.log_sum.square() if terms.z else loss


def slopes(
    own_log_sum_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    vocab_size: int,
    terms: LossOptions,
    upstream_C: torch.Tensor | None = None,
) -> LogitGradFactors:
    """Factors of the gradient of each token's logits.

    Args:
        own_log_sum_C: of the local logits.
        log_sum_C: of the whole vocabulary.
        upstream_C: the gradient of each token's loss, or [C, K] of each of its labels; absent, 1.
    """
    hit_C = torch.ones_like(log_sum_C) if upstream_C is None else upstream_C.to(log_sum_C.dtype)
    rise_C = hit_C.sum(1) if hit_C.dim() > 1 else hit_C
    # d log_sum / dy is the softmax of the whole vocabulary, and z-loss adds 2 z log_sum of it.
    # The last factor turns the softmax of the local logits into it.
    share_C = rise_C * (1 + 2 * terms.z * log_sum_C) * (own_log_sum_C - log_sum_C).exp()
    floor_C = rise_C * (terms.smoothing / vocab_size) if terms.smoothing else None
    return LogitGradFactors(share_C, hit_C * (1 - terms.smoothing), floor_C)
