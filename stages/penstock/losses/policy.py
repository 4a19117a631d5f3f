"""RL policy losses: PPO, GSPO, CISPO, importance sampling and others, from token log-probabilities.

T tokens, N samples. Every loss is minimized and not normalized. Tokens with factor 0 are masked:
their other inputs are ignored and may be any number, also NaN. With K targets per token, tensors
that are [T] are [T, K], and each target is treated like a separate token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

TokenLoss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "drgrpo"]
"""Token-level losses. `gspo` is the sequence-level one (`sequence_losses`)."""


@dataclass(frozen=True)
class LossInputs:
    """Loss inputs of T tokens; each fp32 [T], or all of them [T, K]."""

    factors_T: torch.Tensor  # noqa: N815 - T names the dimension
    """Factor of each token's loss; 0 masks the token."""
    # Log-probabilities of the policy that sampled the tokens, and of the reference model.
    logprobs_T: torch.Tensor  # noqa: N815
    advantages_T: torch.Tensor  # noqa: N815
    reference_T: torch.Tensor  # noqa: N815
    low_T: torch.Tensor  # noqa: N815
    high_T: torch.Tensor  # noqa: N815
    """Clip range of the ratio: lower bound `low_T`, upper bound `high_T`."""


def token_losses(
    loss: TokenLoss, logp_T: torch.Tensor, inputs: LossInputs, params: Mapping[str, float]
) -> torch.Tensor:
    """Loss of each token, [T].

    With the ratio r = exp(logp - logprobs) and the advantage A:

    - `cross_entropy`: -logp
    - `importance_sampling`: -r A
    - `ppo` (Schulman et al. 2017): -min(r A, clip(r) A); dual-clip: with `eps_clip_c` = c above 1
      and A below 0, at most -c A (Ye et al. 2020)
    - `cispo` (MiniMax 2025): -sg(clip(r)) A logp, where sg is stop-gradient
    - `dro` (Richemond et al. 2024): -(A logp - beta / 2 (logp - logprobs)^2)
    - `drgrpo` (Liu et al. 2025): `ppo` plus `kl_beta` times the KL estimate exp(d) - d - 1, with
      d = reference log-probability - logp
    """
    is_active_T = inputs.factors_T != 0
    logp_T, inputs = logp_T.where(is_active_T, 0.0), _neutralize_masked(inputs, is_active_T)
    log_ratio_T, gain_T = logp_T - inputs.logprobs_T, inputs.advantages_T
    match loss:
        case "cross_entropy":
            losses_T = -logp_T
        case "importance_sampling":
            losses_T = -(log_ratio_T.exp() * gain_T)
        case "ppo":
            losses_T = _ppo(logp_T, inputs, params)
        case "cispo":
            ratio_T = log_ratio_T.detach().exp().clamp(inputs.low_T, inputs.high_T)
            losses_T = -(ratio_T * gain_T * logp_T)
        case "dro":
            losses_T = -(logp_T * gain_T - 0.5 * params["beta"] * log_ratio_T.square())
        case "drgrpo":
            # The estimator k3 of J. Schulman, "Approximating KL divergence"
            # (joschu.net/blog/kl-approx.html).
            delta_T = inputs.reference_T - logp_T
            losses_T = _ppo(logp_T, inputs, {}) + params["kl_beta"] * (delta_T.exp() - delta_T - 1)
    return losses_T * inputs.factors_T


def sequence_losses(
    logp_T: torch.Tensor,
    inputs: LossInputs,
    params: Mapping[str, float],
    sum_by_sample: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Loss of each sample, [N]: GSPO-token, i.e. GSPO with per-token advantages (Zheng et al. 2025,
    "GSPO").

    The sequence ratio s is exp of the mean of logp - logprobs over the unmasked tokens of a sample.
    Its loss is the sum over these tokens of -min(s A, clip(s) A) times the factor, with the clip
    range in `params`. Without clipping, the gradient of a token is that of
    -s A exp(logp - sg(logp)) with s detached (sg is stop-gradient), so it depends only on the
    token's own advantage. If all tokens of a sample have the same advantage and factor, this equals
    the gradient through s.

    `sum_by_sample` sums [T] to [N] over all ranks that share the samples; the gradient of each
    summand must be that of the sum.
    """
    is_active_T = inputs.factors_T != 0
    inputs = _neutralize_masked(inputs, is_active_T)
    logp_T = logp_T.where(is_active_T, 0.0)
    # A sample whose tokens are all masked has sums of 0.
    tokens_N = sum_by_sample(is_active_T.to(logp_T.dtype)).clamp(min=1)
    ratio_N = (sum_by_sample(logp_T.detach() - inputs.logprobs_T) / tokens_N).exp()
    # Weighted advantages times exp(logp - sg(logp)): its value is 1, its gradient that of logp.
    gains_T = inputs.advantages_T * inputs.factors_T * (1 + logp_T - logp_T.detach())
    is_gain_T = inputs.advantages_T >= 0
    up_N = sum_by_sample(gains_T.where(is_gain_T, 0))
    down_N = sum_by_sample(gains_T.where(~is_gain_T, 0))
    limit_N = ratio_N.clamp(params["clip_low_threshold"], params["clip_high_threshold"])
    # min(s A, c A) is A min(s, c) for A >= 0 and A max(s, c) for A < 0. The comparisons are negated
    # so that a NaN ratio is not detached but propagates.
    up_N = up_N.where(~(ratio_N > limit_N), up_N.detach())
    down_N = down_N.where(~(ratio_N < limit_N), down_N.detach())
    # Without negative advantages, mask a ratio that overflows: inf * 0 would be NaN.
    above_N = ratio_N.maximum(limit_N).masked_fill(down_N.detach() == 0, 0)
    return -(up_N * ratio_N.minimum(limit_N) + down_N * above_N)


def _neutralize_masked(inputs: LossInputs, is_active_T: torch.Tensor) -> LossInputs:
    """Replace the inputs of masked tokens by neutral values (0, and 1 for the clip range)."""
    return LossInputs(
        inputs.factors_T,
        inputs.logprobs_T.where(is_active_T, 0.0),
        inputs.advantages_T.where(is_active_T, 0.0),
        inputs.reference_T.where(is_active_T, 0.0),
        inputs.low_T.where(is_active_T, 1.0),
        inputs.high_T.where(is_active_T, 1.0),
    )


def _ppo(logp_T: torch.Tensor, inputs: LossInputs, params: Mapping[str, float]) -> torch.Tensor:
    log_ratio_T, gain_T = logp_T - inputs.logprobs_T, inputs.advantages_T
    ratio_T = log_ratio_T.detach().exp()
    limit_T = ratio_T.clamp(inputs.low_T, inputs.high_T)
    is_limited_T = ((gain_T >= 0) & (ratio_T > limit_T)) | ((gain_T <= 0) & (ratio_T < limit_T))
    if bound := params.get("eps_clip_c", 0.0):
        is_bounded_T = (gain_T < 0) & (limit_T.where(is_limited_T, ratio_T) > bound)
        limit_T = limit_T.masked_fill(is_bounded_T, bound)
        is_limited_T = is_limited_T | is_bounded_T
    # Mask clipped tokens before exp: an overflowing ratio times a gradient of 0 would be NaN.
    free_T = log_ratio_T.masked_fill(is_limited_T, 0.0).exp()
    return -(limit_T.where(is_limited_T, free_T) * gain_T)
