"""Losses that keep experts evenly used and routers' logits small, and how even their use is.

All are functions of what routers saw (`models.layers.router.Seen`): sums, so that a loss is over as
many ranks, micro-batches and layers as were added up before it was asked for. E experts.
"""

import math
from collections.abc import Iterable
from functools import reduce

import torch

from penstock.models.layers.router import Seen


def summed(seen: Iterable[Seen]) -> Seen:
    """What several routers saw, or one saw of several micro-batches, as if it were one."""

    def plus(one: Seen, other: Seen) -> Seen:
        return Seen(
            one.num_tokens + other.num_tokens,
            one.counts_E + other.counts_E,
            one.probabilities_E + other.probabilities_E,
            one.squares + other.squares,
        )

    return reduce(plus, seen)


def load_balancing_loss(frequencies_E: torch.Tensor, shares_E: torch.Tensor) -> torch.Tensor:
    """`E * sum(frequencies * shares)`, a scalar (Fedus et al. 2021, "Switch Transformers").

    K, the experts each token chooses, where all are used alike, and more where the same few are
    favoured. Gradients flow through the shares alone. The frequencies may be of more tokens than
    the shares: those of a global batch leave single micro-batches free to favour some experts (Qiu
    et al. 2025, "Demons in the Detail").

    Args:
        frequencies_E: how often each expert was chosen per token, `Seen.frequencies_E`.
        shares_E: each expert's mean share of a token's scores, `Seen.shares_E`.
    """
    return frequencies_E.numel() * (frequencies_E * shares_E).sum()


def z_loss(seen: Seen) -> torch.Tensor:
    """The mean over tokens of the squared logarithm of the sum of exponentials of the logits, a
    scalar (Zoph et al. 2022, "ST-MoE")."""
    return seen.squares / max(1, seen.num_tokens)


def imbalance(counts_E: torch.Tensor) -> float:
    """Tokens of the busiest expert over their mean: 1 where all are used alike, at most E."""
    mean = counts_E.double().mean().item()
    return counts_E.max().item() / mean if mean else 1.0


def entropy(counts_E: torch.Tensor) -> float:
    """The entropy of the choice of experts over its largest: 1 where all are used alike, 0 where
    one is used alone."""
    if counts_E.numel() < 2 or not counts_E.any():
        return 1.0
    return torch.special.entr(counts_E.double() / counts_E.sum()).sum().item() / math.log(
        counts_E.numel()
    )
