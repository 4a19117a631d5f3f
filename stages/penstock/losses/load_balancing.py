"""Losses that keep experts evenly used and routers' logits small, and how even their use is.

All are of sums over tokens, as routers see them (`models.layers.watch.Seen`), and are sums over
tokens themselves: what the ranks, micro-batches and layers of a step give adds up, and is divided
by the step's tokens and layers where they are known. R packed rows, E experts.
"""

import math

import torch


def aux_loss_grad(counts_RE: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """How strongly the load-balancing loss pulls on each expert's share of the scores, fp32 [R, E].

    It is the experts' use, `E * counts / tokens`, which has no gradient: 1 for each expert that a
    token chooses, where all are used alike.

    Args:
        counts_RE: tokens that chose each expert, of all of a row or of all of a step.
        tokens_R: the tokens among which they were counted.
    """
    return counts_RE.shape[-1] * counts_RE.float() / tokens_R.clamp(min=1)[:, None]


def load_balancing_loss(pull_RE: torch.Tensor, shares_RE: torch.Tensor) -> torch.Tensor:
    """The load-balancing loss times tokens, a scalar (Fedus et al. 2021, "Switch Transformers").

    The loss of a row of n tokens is `E * sum_e f_e * P_e`: f_e = counts_e / n is how often an
    expert was chosen, P_e = shares_e / n its mean share of the scores. It is K, the experts each
    token chooses, where all are used alike, and more where the same few are favoured. Times n it is
    `sum_e pull_e * shares_e` with `aux_loss_grad`, which may be added up over any part of the
    tokens.

    With frequencies of all tokens of a step, single rows are free to favour some experts (Qiu et
    al. 2025, "Demons in the Detail").
    """
    return (pull_RE * shares_RE).sum()


def z_loss(squares_R: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of the squared logarithm of the sum of exponentials of the logits, a
    scalar (Zoph et al. 2022, "ST-MoE")."""
    return squares_R.sum()


def update_expert_bias(counts_E: torch.Tensor, rate: float) -> torch.Tensor:
    """What is added to the biases by which experts are chosen, fp64 [E]: `rate` where an expert got
    less than the mean of the step's tokens, and minus that where it got more (Wang et al. 2024,
    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts")."""
    counts_E = counts_E.double()
    return rate * (counts_E.mean() - counts_E).sign()


def imbalance(counts_E: torch.Tensor) -> float:
    """Tokens of the busiest expert over their mean: 1 where all are used alike, at most E."""
    mean = counts_E.double().mean().item()
    return counts_E.max().item() / mean if mean else 1.0


def entropy(weights_E: torch.Tensor) -> float:
    """The entropy of a distribution over experts, given up to a factor, over its largest: 1 where
    all are alike, 0 where there is one alone."""
    if weights_E.numel() < 2 or not weights_E.any():
        return 1.0
    return torch.special.entr(weights_E.double() / weights_E.sum()).sum().item() / math.log(
        weights_E.numel()
    )
