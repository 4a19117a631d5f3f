"""MoE load balancing: auxiliary loss, router z-loss, expert bias update, and balance metrics.

Inputs are sums over tokens of router statistics, and losses are sums over tokens too: the values of
the ranks, micro-batches and layers of a step are added, and later divided by the step's tokens and
layers. R packed rows, E experts.
"""

import math

import torch


def aux_loss_grad(counts_RE: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """Gradient of the load-balancing loss with respect to summed router scores, fp32 [R, E].

    It is the relative expert load, `E * counts / tokens`, which has no gradient itself. With
    balanced experts every entry is K, the experts per token.

    Args:
        counts_RE: tokens routed to each expert, over a whole row or a whole step.
        tokens_R: number of tokens over which they were counted.
    """
    return counts_RE.shape[-1] * counts_RE.float() / tokens_R.clamp(min=1)[:, None]


def load_balancing_loss(pull_RE: torch.Tensor, shares_RE: torch.Tensor) -> torch.Tensor:
    """Load-balancing auxiliary loss times tokens, a scalar (Fedus et al. 2021, "Switch
    Transformers").

    The loss of a row of n tokens is `E * sum_e f_e * P_e`, with f_e = counts_e / n the fraction of
    tokens routed to expert e and P_e = shares_e / n its mean router score. It is K, the experts per
    token, if all experts are used equally, and more if a few are preferred. Times n it is
    `sum_e pull_e * shares_e`, with `pull_RE` from `aux_loss_grad`, which can be summed over any
    subset of the tokens.

    With counts of the whole step (global batch), a single row may prefer some experts (Qiu et al.
    2025, "Demons in the Detail").
    """
    return (pull_RE * shares_RE).sum()


def z_loss(squares_R: torch.Tensor) -> torch.Tensor:
    """Router z-loss: squared logsumexp of the router logits, summed over tokens, a scalar (Zoph et
    al. 2022, "ST-MoE")."""
    return squares_R.sum()


def update_expert_bias(counts_E: torch.Tensor, rate: float) -> torch.Tensor:
    """Update of the expert bias (aux-loss-free load balancing), fp64 [E]: `rate` if an expert got
    fewer tokens than the mean of the step, `-rate` if it got more (Wang et al. 2024,
    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts")."""
    counts_E = counts_E.double()
    return rate * (counts_E.mean() - counts_E).sign()


def imbalance(counts_E: torch.Tensor) -> float:
    """Maximum over mean tokens per expert: 1 if all are used equally, at most E."""
    mean = counts_E.double().mean().item()
    return counts_E.max().item() / mean if mean else 1.0


def entropy(weights_E: torch.Tensor) -> float:
    """Normalized entropy of an (unnormalized) distribution over experts: 1 if uniform, 0 if all
    weight is on one expert."""
    if weights_E.numel() < 2 or not weights_E.any():
        return 1.0
    nats = torch.special.entr(weights_E.double() / weights_E.sum()).sum().item()
    return nats / math.log(weights_E.numel())
