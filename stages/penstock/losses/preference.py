"""Losses that prefer one answer to another, from the log-probabilities of whole answers.

Every one of them is a function of each answer's ratio: the log of how much likelier the model finds
it than the reference does, log p(answer) - log p_ref(answer), with 0 for the latter where there is
no reference. D samples, A their two answers: the chosen one and the rejected one, or for answers
that are judged one by one their own and one that belongs to another prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.config.schema.preference import LossType, Normalisation, PreferenceConfig

SMALLEST_GAP = 1e-6
"""What is added to the gap of two scores, so that its logarithm is there."""


@dataclass(frozen=True)
class Answers:
    """What a loss looks at."""

    ratios_DA: torch.Tensor  # noqa: N815 - DA names the dimensions
    """Normalised, fp32."""
    baseline_A: torch.Tensor | None = None  # noqa: N815
    """How far the model has moved on the whole: `baseline` of all samples of the step."""
    desirable_D: torch.Tensor | None = None  # noqa: N815
    """Whether a sample's own answer is good, where answers are judged one by one."""
    score_gap_D: torch.Tensor | None = None  # noqa: N815
    """By how much the chosen answer was scored higher, where answers are scored."""


LossOf = Callable[[Answers, PreferenceConfig], torch.Tensor]
"""The loss of each sample, [D]."""


def preference_losses(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """The loss of each sample, fp32 [D], before `pref_loss_ratio`; their mean is what is learnt."""
    return LOSSES[how.loss_type](answers, how)


def normalised(
    ratios_DA: torch.Tensor, tokens_DA: torch.Tensor, how: Normalisation
) -> torch.Tensor:
    """Summed log-probabilities as the loss takes them: [D, A] for [D, A] tokens of the answers."""
    tokens_DA = tokens_DA.clamp(min=1)
    if how == "mean":
        return ratios_DA / tokens_DA
    if how == "pair_mean":
        return ratios_DA * (tokens_DA.float().mean(1, keepdim=True) / tokens_DA)
    return ratios_DA


def baseline(sums_A: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """How far a model has moved from its reference, [A], from the sums of the ratios of `count`
    samples: an estimate of the KL divergence, at least 0 (equation 8 of KTO, arXiv 2402.01306).

    Nothing is learnt through it.
    """
    return (sums_A.detach() / count.clamp(min=1)).clamp(min=0)


def rewards(ratios_DA: torch.Tensor, how: PreferenceConfig) -> torch.Tensor:
    """What the model is taken to find the answers worth, [D, A] (section 4 of DPO, arXiv
    2305.18290)."""
    return how.beta * ratios_DA.detach()


def _margin(answers: Answers) -> torch.Tensor:
    chosen_D, rejected_D = answers.ratios_DA.unbind(1)
    return chosen_D - rejected_D


def _smoothed(logits_D: torch.Tensor, how: PreferenceConfig) -> torch.Tensor:
    """The Bradley-Terry loss of preferences, some of which are the wrong way round."""
    share = how.label_smoothing
    return -(1 - share) * F.logsigmoid(logits_D) - share * F.logsigmoid(-logits_D)


def _sigmoid(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """DPO (equation 7 of arXiv 2305.18290); conservative with smoothing, and with scores ODPO
    (arXiv 2402.10571)."""
    logits_D = how.beta * _margin(answers)
    if how.offset_alpha:
        if answers.score_gap_D is None or len(answers.score_gap_D) != len(logits_D):
            raise ValueError("preference.offset_alpha needs the scores of answers")
        logits_D = logits_D - how.offset_alpha * torch.log(answers.score_gap_D + SMALLEST_GAP)
    return _smoothed(logits_D, how)


def _hinge(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """SLiC-HF (arXiv 2305.10425), on DPO's margins."""
    return torch.relu(1 - how.beta * _margin(answers))


def _ipo(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """IPO (equation 17 of arXiv 2310.12036); `beta` is its tau."""
    return (_margin(answers) - 1 / (2 * how.beta)) ** 2


def _simpo(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """SimPO (equation 6 of arXiv 2405.14734)."""
    return _smoothed(how.beta * _margin(answers) - how.simpo_gamma, how)


def _cpo(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """CPO (equation 4 of arXiv 2401.08417), without what it adds of cross-entropy."""
    return _smoothed(how.beta * _margin(answers), how)


def _dpop(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """DPO-Positive (equation 3 of arXiv 2402.13228)."""
    lost_D = how.dpop_lambda * torch.relu(-answers.ratios_DA[:, 0])
    if how.dpop_penalty == "inside":
        return -F.logsigmoid(how.beta * (_margin(answers) - lost_D))
    return -F.logsigmoid(how.beta * _margin(answers)) + lost_D


def _sppo_hard(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """SPPO with preferences taken as certain (equation 4.9 of arXiv 2405.00675)."""
    chosen_D, rejected_D = answers.ratios_DA.unbind(1)
    half = 1 / (2 * how.beta)
    return (chosen_D - half) ** 2 + (rejected_D + half) ** 2


def _nca_pair(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """NCA of pairs (arXiv 2402.05369)."""
    chosen_D, rejected_D = (how.beta * answers.ratios_DA).unbind(1)
    both_D = F.logsigmoid(-chosen_D) + F.logsigmoid(-rejected_D)
    return -F.logsigmoid(chosen_D) - 0.5 * both_D


def _kto_pair(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """KTO of pairs: each answer is compared with how far the other ones have moved."""
    assert answers.baseline_A is not None
    chosen_D, rejected_D = answers.ratios_DA.unbind(1)
    of_chosen, of_rejected = answers.baseline_A
    good_D = 1 - torch.sigmoid(how.beta * (chosen_D - of_rejected))
    bad_D = 1 - torch.sigmoid(how.beta * (of_chosen - rejected_D))
    return (good_D + bad_D) / 2


def _kto(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """KTO (equation 8 of arXiv 2402.01306), its reference point from answers to other prompts."""
    assert answers.baseline_A is not None
    assert answers.desirable_D is not None
    moved_D = how.beta * (answers.ratios_DA[:, 0] - answers.baseline_A[1])
    good_D = how.desirable_weight * (1 - torch.sigmoid(moved_D))
    bad_D = how.undesirable_weight * (1 - torch.sigmoid(-moved_D))
    return torch.where(answers.desirable_D, good_D, bad_D)


def _odds(answers: Answers, how: PreferenceConfig) -> torch.Tensor:
    """ORPO's odds ratio (equations 4 and 6 of arXiv 2403.07691); its weight is
    `pref_loss_ratio`."""
    del how
    odds_DA = answers.ratios_DA - _log1mexp(answers.ratios_DA)
    return -F.logsigmoid(odds_DA[:, 0] - odds_DA[:, 1])


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x at most 0, where neither form loses digits (Mächler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931
    # Each form is given numbers that it takes: what is not chosen has a gradient too.
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
