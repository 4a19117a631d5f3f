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

SMALLEST_GAP = 1e-6
"""Added to the score gap, so that its logarithm is finite."""


@dataclass(frozen=True)
class Answers:
    """Inputs of a preference loss."""

    ratios_DA: torch.Tensor  # noqa: N815 - DA names the dimensions
    """Log ratios, normalized by `normalized`, fp32."""
    baseline_A: torch.Tensor | None = None  # noqa: N815
    """KL baseline: `baseline` over all samples of the step."""
    desirable_D: torch.Tensor | None = None  # noqa: N815
    """KTO: whether a sample's completion is desirable."""
    score_gap_D: torch.Tensor | None = None  # noqa: N815
    """Chosen score minus rejected score, if completions have scores."""


LossOf = Callable[[Answers, PreferenceConfig], torch.Tensor]
"""Returns the loss of each sample, [D]."""


def preference_losses(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """Loss of each sample, fp32 [D], before `pref_loss_ratio`; training minimizes their mean."""
    return LOSSES[how.loss_type](answers, how)


def normalized(
    ratios_DA: torch.Tensor, tokens_DA: torch.Tensor, how: Normalization
) -> torch.Tensor:
    """Length-normalize summed log-probabilities [D, A]; `tokens_DA` are completion lengths."""
    tokens_DA = tokens_DA.clamp(min=1)
    if how == "mean":
        return ratios_DA / tokens_DA
    if how == "pair_mean":
        return ratios_DA * (tokens_DA.float().mean(1, keepdim=True) / tokens_DA)
    return ratios_DA


def baseline(sums_A: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """KL baseline, [A], from the sums of the log ratios of `count` samples: an estimate of the KL
    divergence between policy and reference, at least 0 (equation 8 of KTO, arXiv 2402.01306).

    Detached: no gradient.
    """
    return (sums_A.detach() / count.clamp(min=1)).clamp(min=0)


def rewards(ratios_DA: torch.Tensor, how: PreferenceConfig) -> torch.Tensor:
    """Implicit rewards, beta times the log ratios, [D, A] (section 4 of DPO, arXiv 2305.18290).
    Detached."""
    return how.beta * ratios_DA.detach()


def _margin(answers: Answers) -> torch.Tensor:
    chosen_D, rejected_D = answers.ratios_DA.unbind(1)
    return chosen_D - rejected_D


def _smoothed(logits_D: torch.Tensor, how: PreferenceConfig) -> torch.Tensor:
    """Bradley-Terry loss with label smoothing: a share of the preferences is flipped."""
    share = how.label_smoothing
    return -(1 - share) * F.logsigmoid(logits_D) - share * F.logsigmoid(-logits_D)


def _sigmoid(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """DPO (equation 7 of arXiv 2305.18290); conservative DPO with label smoothing, ODPO with scores
    (arXiv 2402.10571)."""
    logits_D = how.beta * _margin(answers)
    if how.offset_alpha:
        if answers.score_gap_D is None or len(answers.score_gap_D) != len(logits_D):
            raise ValueError("preference.offset_alpha needs the scores of answers")
        logits_D = logits_D - how.offset_alpha * torch.log(answers.score_gap_D + SMALLEST_GAP)
    return _smoothed(logits_D, how)


def _hinge(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """Hinge loss of SLiC-HF (arXiv 2305.10425) on DPO margins."""
    return torch.relu(1 - how.beta * _margin(answers))


def _ipo(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """IPO (equation 17 of arXiv 2310.12036); `beta` is its tau."""
    return (_margin(answers) - 1 / (2 * how.beta)) ** 2


def _simpo(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """SimPO (equation 6 of arXiv 2405.14734)."""
    return _smoothed(how.beta * _margin(answers) - how.simpo_gamma, how)


def _cpo(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """CPO (equation 4 of arXiv 2401.08417), without its cross-entropy term."""
    return _smoothed(how.beta * _margin(answers), how)


def _dpop(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """DPO-Positive (equation 3 of arXiv 2402.13228)."""
    lost_D = how.dpop_lambda * torch.relu(-answers.ratios_DA[:, 0])
    if how.dpop_penalty == "inside":
        return -F.logsigmoid(how.beta * (_margin(answers) - lost_D))
    return -F.logsigmoid(how.beta * _margin(answers)) + lost_D


def _sppo_hard(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """SPPO with hard labels, probabilities 1 and 0 (equation 4.9 of arXiv 2405.00675)."""
    chosen_D, rejected_D = answers.ratios_DA.unbind(1)
    half = 1 / (2 * how.beta)
    return (chosen_D - half) ** 2 + (rejected_D + half) ** 2


def _nca_pair(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """NCA for pairs (arXiv 2402.05369)."""
    chosen_D, rejected_D = (how.beta * answers.ratios_DA).unbind(1)
    both_D = F.logsigmoid(-chosen_D) + F.logsigmoid(-rejected_D)
    return -F.logsigmoid(chosen_D) - 0.5 * both_D


def _kto_pair(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """KTO for pairs: each completion is compared with the KL baseline of the other side."""
    assert answers.baseline_A is not None
    chosen_D, rejected_D = answers.ratios_DA.unbind(1)
    of_chosen, of_rejected = answers.baseline_A
    good_D = 1 - torch.sigmoid(how.beta * (chosen_D - of_rejected))
    bad_D = 1 - torch.sigmoid(how.beta * (of_chosen - rejected_D))
    return (good_D + bad_D) / 2


def _kto(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """KTO (equation 8 of arXiv 2402.01306); the KL baseline is from mismatched completions."""
    assert answers.baseline_A is not None
    assert answers.desirable_D is not None
    moved_D = how.beta * (answers.ratios_DA[:, 0] - answers.baseline_A[1])
    good_D = how.desirable_weight * (1 - torch.sigmoid(moved_D))
    bad_D = how.undesirable_weight * (1 - torch.sigmoid(-moved_D))
    return torch.where(answers.desirable_D, good_D, bad_D)


def _odds(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """Odds ratio loss of ORPO (equations 4 and 6 of arXiv 2403.07691); its weight is
    `pref_loss_ratio`."""
    del how
    odds_DA = answers.ratios_DA - _log1mexp(answers.ratios_DA)
    return -F.logsigmoid(odds_DA[:, 0] - odds_DA[:, 1])


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x <= 0, numerically stable (Mächler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931
    # Each branch gets valid inputs: the branch that `where` discards still has a gradient.
    by_expm1 = torch.log(-torch.expm1(torch.where(near, x, -0.5)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, by_expm1, by_log1p)


LOSSES: Mapping[LossType, LossOf] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "kto_pair": _kto_pair,
    "kto": _kto,
    "sppo_hard": _sppo_hard,
    "nca_pair": _nca_pair,
    "dpop": _dpop,
    "simpo": _simpo,
    "cpo": _cpo,
    "or": _odds,
    "orpo": _odds,
}
