"""Preference losses: DPO, IPO, SimPO, KTO, ORPO and others, from log-probabilities of completions.

Each loss is a function of the log ratio of each completion, log p(completion) -
log p_ref(completion), where the reference log-prob is 0 without a reference model. D samples, A
their two completions: chosen and rejected; for KTO, the completion and a mismatched one (of another
prompt) for the KL baseline.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.config.schema.preference import LossType, Normalization, PreferenceConfig

# Added to the score gap, so that its logarithm is finite.
MIN_SCORE_GAP = 1e-6


@dataclass(frozen=True)
class PreferenceInputs:
    """Inputs of a preference loss."""

    ratios_DA: torch.Tensor  # noqa: N815 - DA names the dimensions
    """Log ratios, normalized by `length_normalize`, fp32."""
    baseline_A: torch.Tensor | None = None  # noqa: N815
    """KL baseline: `kl_baseline` over all samples of the step."""
    desirable_D: torch.Tensor | None = None  # noqa: N815
    score_gap_D: torch.Tensor | None = None  # noqa: N815
    """Chosen score minus rejected score, if completions have scores."""


PreferenceLossFn = Callable[[PreferenceInputs, PreferenceConfig], torch.Tensor]


def preference_losses(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """Loss of each sample, fp32 [D], before `pref_loss_ratio`; training minimizes their mean."""
    return LOSSES[config.loss_type](inputs, config)


def length_normalize(
    ratios_DA: torch.Tensor, tokens_DA: torch.Tensor, config: Normalization
) -> torch.Tensor:
    """Length-normalize summed log-probabilities [D, A]; `tokens_DA` are completion lengths."""
    tokens_DA = tokens_DA.clamp(min=1)
    if config == "mean":
        return ratios_DA / tokens_DA
    if config == "pair_mean":
        return ratios_DA * (tokens_DA.float().mean(1, keepdim=True) / tokens_DA)
    return ratios_DA


def kl_baseline(sums_A: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """KL baseline, [A], from the sums of the log ratios of `count` samples: an estimate of the KL
    divergence between policy and reference, at least 0 (equation 8 of KTO, arXiv 2402.01306).

    Detached: no gradient.
    """
    return (sums_A.detach() / count.clamp(min=1)).clamp(min=0)


def implicit_rewards(ratios_DA: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Implicit rewards, beta times the log ratios, [D, A] (section 4 of DPO, arXiv 2305.18290).
    Detached."""
    return config.beta * ratios_DA.detach()


def _margin(inputs: PreferenceInputs) -> torch.Tensor:
    chosen_D, rejected_D = inputs.ratios_DA.unbind(1)
    return chosen_D - rejected_D


def _bradley_terry(logits_D: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Bradley-Terry loss with label smoothing: a share of the preferences is flipped."""
    share = config.label_smoothing
    return -(1 - share) * F.logsigmoid(logits_D) - share * F.logsigmoid(-logits_D)


def _sigmoid(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """DPO (equation 7 of arXiv 2305.18290); conservative DPO with label smoothing, ODPO with scores
    (arXiv 2402.10571)."""
    logits_D = config.beta * _margin(inputs)
    if config.offset_alpha:
        if inputs.score_gap_D is None or len(inputs.score_gap_D) != len(logits_D):
            raise ValueError("preference.offset_alpha needs the scores of answers")
        logits_D = logits_D - config.offset_alpha * torch.log(inputs.score_gap_D + MIN_SCORE_GAP)
    return _bradley_terry(logits_D, config)


def _dpop(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """DPO-Positive (equation 3 of arXiv 2402.13228)."""
    lost_D = config.dpop_lambda * torch.relu(-inputs.ratios_DA[:, 0])
    if config.dpop_penalty == "inside":
        return -F.logsigmoid(config.beta * (_margin(inputs) - lost_D))
    return -F.logsigmoid(config.beta * _margin(inputs)) + lost_D


def _sppo_hard(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """SPPO with hard labels, probabilities 1 and 0 (equation 4.9 of arXiv 2405.00675)."""
    chosen_D, rejected_D = inputs.ratios_DA.unbind(1)
    half = 1 / (2 * config.beta)
    return (chosen_D - half) ** 2 + (rejected_D + half) ** 2


def _nca_pair(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """NCA for pairs (arXiv 2402.05369)."""
    chosen_D, rejected_D = (config.beta * inputs.ratios_DA).unbind(1)
    both_D = F.logsigmoid(-chosen_D) + F.logsigmoid(-rejected_D)
    return -F.logsigmoid(chosen_D) - 0.5 * both_D


def _kto_pair(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """KTO for pairs: each completion is compared with the KL baseline of the other side."""
    assert inputs.baseline_A is not None
    chosen_D, rejected_D = inputs.ratios_DA.unbind(1)
    chosen_baseline, rejected_baseline = inputs.baseline_A
    good_D = 1 - torch.sigmoid(config.beta * (chosen_D - rejected_baseline))
    bad_D = 1 - torch.sigmoid(config.beta * (chosen_baseline - rejected_D))
    return (good_D + bad_D) / 2


def _kto(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """KTO (equation 8 of arXiv 2402.01306)."""
    assert inputs.baseline_A is not None
    assert inputs.desirable_D is not None
    # The KL baseline is from mismatched completions.
    moved_D = config.beta * (inputs.ratios_DA[:, 0] - inputs.baseline_A[1])
    good_D = config.desirable_weight * (1 - torch.sigmoid(moved_D))
    bad_D = config.undesirable_weight * (1 - torch.sigmoid(-moved_D))
    return torch.where(inputs.desirable_D, good_D, bad_D)


def _odds(inputs: PreferenceInputs, config: PreferenceConfig) -> torch.Tensor:
    """Odds ratio loss of ORPO (equations 4 and 6 of arXiv 2403.07691); its weight is
    `pref_loss_ratio`."""
    del config
    odds_DA = inputs.ratios_DA - _log1mexp(inputs.ratios_DA)
    return -F.logsigmoid(odds_DA[:, 0] - odds_DA[:, 1])


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x <= 0, numerically stable (Mächler 2012)."""
    # A probability of 1 would have infinite odds.
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    # -log 2: above it expm1 is accurate, below it log1p is.
    near = x > -0.6931
    # Each branch gets valid inputs: the branch that `where` discards still has a gradient.
    by_expm1 = torch.log(-torch.expm1(torch.where(near, x, -0.5)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, by_expm1, by_log1p)


LOSSES: Mapping[LossType, PreferenceLossFn] = {
    "sigmoid": _sigmoid,
    # SLiC-HF (arXiv 2305.10425) on DPO margins.
    "hinge": lambda inputs, config: torch.relu(1 - config.beta * _margin(inputs)),
    # IPO (equation 17 of arXiv 2310.12036); `beta` is its tau.
    "ipo": lambda inputs, config: (_margin(inputs) - 1 / (2 * config.beta)) ** 2,
    "kto_pair": _kto_pair,
    "kto": _kto,
    "sppo_hard": _sppo_hard,
    "nca_pair": _nca_pair,
    "dpop": _dpop,
    # SimPO (equation 6 of arXiv 2405.14734).
    "simpo": lambda inputs, config: _bradley_terry(
        config.beta * _margin(inputs) - config.simpo_gamma, config
    ),
    # CPO (equation 4 of arXiv 2401.08417), without its cross-entropy term.
    "cpo": lambda inputs, config: _bradley_terry(config.beta * _margin(inputs), config),
    "or": _odds,
    "orpo": _odds,
}
