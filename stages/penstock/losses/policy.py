"""Losses of policies: functions of each token's log-probability and of what was known of it before.

T tokens, N samples. Every loss is one to be made small, and none of them is divided by anything.
Of tokens whose factor is 0 nothing else is looked at, so what stands there may be any number.
Where tokens have several targets, K of them, what is [T] is [T, K]: each is as a token by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

TokenLoss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "drgrpo"]
"""Losses of tokens, each by itself. That of sequences is `gspo`."""


@dataclass(frozen=True)
class LossInputs:
    """What is known of T tokens; fp32 [T] each, or all of them [T, K]."""

    factors_T: torch.Tensor  # noqa: N815 - T names the dimension
    """What a token's loss is multiplied by."""
    logprobs_T: torch.Tensor  # noqa: N815
    """Of the model that drew them."""
    advantages_T: torch.Tensor  # noqa: N815
    reference_T: torch.Tensor  # noqa: N815
    """Log-probabilities of the model to stay close to."""
    low_T: torch.Tensor  # noqa: N815
    high_T: torch.Tensor  # noqa: N815
    """What ratios are clipped to."""


def token_losses(
    loss: TokenLoss, logp_T: torch.Tensor, told: LossInputs, params: Mapping[str, float]
) -> torch.Tensor:
    """The loss of each token, [T].

    With r = exp(logp - logprobs) and A the advantage:

    - `cross_entropy`: -logp
    - `importance_sampling`: -r A
    - `ppo` (Schulman et al. 2017): -min(r A, clip(r) A); with `eps_clip_c` = c above 1 and A below
      0 at most -c A (Ye et al. 2020)
    - `cispo` (MiniMax 2025): -A logp times clip(r), through which no gradient passes
    - `dro` (Richemond et al. 2024): -(A logp - beta / 2 (logp - logprobs)^2)
    - `drgrpo` (Liu et al. 2025): that of `ppo`, plus `kl_beta` times exp(d) - d - 1, where d is the
      reference's log-probability less this one
    """
    counts_T = told.factors_T != 0
    logp_T = logp_T.where(counts_T, 0.0)
    return _LOSSES[loss](logp_T, _only(told, counts_T), params) * told.factors_T


def sequence_losses(
    logp_T: torch.Tensor,
    told: LossInputs,
    params: Mapping[str, float],
    of_samples: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The loss of each sample, [N] (Zheng et al. 2025, "GSPO"; the form of it whose tokens have
    advantages of their own, "GSPO-token").

    The ratio s of a sample is exp of the mean of logp - logprobs over its tokens that count, and
    its loss the sum of -min(s A, clip(s) A) times the factor over these, with the clips that are
    `params`. Through what is not clipped a token's gradient is that of s A exp(logp - sg(logp)),
    where no gradient passes through s and sg: its own advantage moves it, and no other's. Where all
    of a sample have one advantage and one factor that is the gradient through s.

    `of_samples` sums [T] to [N] over all ranks that share the samples; the gradient of each one's
    summand must be that of the sum.
    """
    counts_T = told.factors_T != 0
    only = _only(told, counts_T)
    logp_T = logp_T.where(counts_T, 0.0)
    tokens_N = of_samples(counts_T.to(logp_T.dtype)).clamp(min=1)
    ratio_N = (of_samples(logp_T.detach() - only.logprobs_T) / tokens_N).exp()
    # What is to be gained, or lost, with the gradient of exp(logp - sg(logp)), which is 1.
    gains_T = only.advantages_T * told.factors_T * (1 + logp_T - logp_T.detach())
    is_gain_T = only.advantages_T >= 0
    up_N, down_N = of_samples(gains_T.where(is_gain_T, 0)), of_samples(gains_T.where(~is_gain_T, 0))
    limit_N = ratio_N.clamp(params["clip_low_threshold"], params["clip_high_threshold"])
    # min(s A, c A) is A min(s, c) for what is to be gained, and A max(s, c) for what is to be lost.
    # Asked so that of a ratio which is no number nothing is hidden.
    up_N = up_N.where(~(ratio_N > limit_N), up_N.detach())
    down_N = down_N.where(~(ratio_N < limit_N), down_N.detach())
    # Where nothing is to be lost, a ratio that overflows is none of what is to be gained.
    above_N = ratio_N.maximum(limit_N).masked_fill(down_N.detach() == 0, 0)
    return -(up_N * ratio_N.minimum(limit_N) + down_N * above_N)


def _only(told: LossInputs, counts_T: torch.Tensor) -> LossInputs:
    """What is known of the tokens that count, and zeros for the others."""
    return LossInputs(
        told.factors_T,
        told.logprobs_T.where(counts_T, 0.0),
        told.advantages_T.where(counts_T, 0.0),
        told.reference_T.where(counts_T, 0.0),
        told.low_T.where(counts_T, 1.0),
        told.high_T.where(counts_T, 1.0),
    )


def _cross_entropy(logp_T: torch.Tensor, _: LossInputs, __: Mapping[str, float]) -> torch.Tensor:
    return -logp_T


def _importance(logp_T: torch.Tensor, told: LossInputs, _: Mapping[str, float]) -> torch.Tensor:
    return -((logp_T - told.logprobs_T).exp() * told.advantages_T)


def _ppo(logp_T: torch.Tensor, told: LossInputs, params: Mapping[str, float]) -> torch.Tensor:
    apart_T, gain_T = logp_T - told.logprobs_T, told.advantages_T
    ratio_T = apart_T.detach().exp()
    limit_T = ratio_T.clamp(told.low_T, told.high_T)
    is_limited_T = ((gain_T >= 0) & (ratio_T > limit_T)) | ((gain_T <= 0) & (ratio_T < limit_T))
    if bound := params.get("eps_clip_c", 0.0):
        is_bounded_T = (gain_T < 0) & (limit_T.where(is_limited_T, ratio_T) > bound)
        limit_T = limit_T.masked_fill(is_bounded_T, bound)
        is_limited_T = is_limited_T | is_bounded_T
    # What is limited has a gradient of 0 also where its ratio overflows: 0 times that is no number.
    free_T = apart_T.masked_fill(is_limited_T, 0.0).exp()
    return -(limit_T.where(is_limited_T, free_T) * gain_T)


def _cispo(logp_T: torch.Tensor, told: LossInputs, _: Mapping[str, float]) -> torch.Tensor:
    ratio_T = (logp_T.detach() - told.logprobs_T).exp().clamp(told.low_T, told.high_T)
    return -(ratio_T * told.advantages_T * logp_T)


def _dro(logp_T: torch.Tensor, told: LossInputs, params: Mapping[str, float]) -> torch.Tensor:
    apart_T = logp_T - told.logprobs_T
    return -(logp_T * told.advantages_T - 0.5 * params["beta"] * apart_T.square())


def _drgrpo(logp_T: torch.Tensor, told: LossInputs, params: Mapping[str, float]) -> torch.Tensor:
    apart_T = told.reference_T - logp_T
    return _ppo(logp_T, told, {}) + params["kl_beta"] * (apart_T.exp() - apart_T - 1)


_LOSSES: Mapping[
    TokenLoss, Callable[[torch.Tensor, LossInputs, Mapping[str, float]], torch.Tensor]
] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "drgrpo": _drgrpo,
}
