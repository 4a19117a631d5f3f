"""Losses of policies, judged by their formulas and the derivatives of these, by hand in fp64."""

import math
from typing import NamedTuple

import pytest
import torch

from penstock.losses.policy import LossInputs, sequence_losses, token_losses

# Ratios within and beyond the clips on either side, with both signs of what is to be gained.
RATIOS = [0.5, 0.9, 1.0, 1.1, 1.7, 0.5, 0.9, 1.1, 1.7, 6.0]
GAINS = [2.0, 1.5, 0.7, 1.0, 3.0, -1.0, -2.0, -0.5, -1.5, -2.0]
FACTORS = [1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 3.0, 1.0, 0.25, 1.0]
LOW, HIGH = 0.8, 1.2
CLIPS = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}


def given(**changes):
    told = {
        "factors_T": FACTORS,
        "logprobs_T": [-1.0 - number / 7 for number in range(len(RATIOS))],
        "advantages_T": GAINS,
        "reference_T": [-1.2 - number / 9 for number in range(len(RATIOS))],
        "low_T": [LOW] * len(RATIOS),
        "high_T": [HIGH] * len(RATIOS),
    }
    told |= changes
    return LossInputs(
        **{name: torch.tensor(its, dtype=torch.float64) for name, its in told.items()}
    )


def log_probs(told):
    return told.logprobs_T + torch.tensor(RATIOS, dtype=torch.float64).log()


def clipped(ratio):
    return min(max(ratio, LOW), HIGH)


class At(NamedTuple):
    """One token."""

    ratio: float
    gain: float
    logp: float
    old: float
    reference: float


def surrogate(ratio, gain):
    """-min(r A, clip(r) A) and its derivative by log r."""
    if ratio * gain <= clipped(ratio) * gain:
        return -ratio * gain, -ratio * gain
    return -clipped(ratio) * gain, 0.0


def ppo(at):
    return surrogate(at.ratio, at.gain)


def bounded(at):
    """The same with at most three times what is lost."""
    loss, slope = ppo(at)
    return (-3 * at.gain, 0.0) if at.gain < 0 and loss > -3 * at.gain else (loss, slope)


def cross_entropy(at):
    return -at.logp, -1.0


def importance_sampling(at):
    return -at.ratio * at.gain, -at.ratio * at.gain


def cispo(at):
    return -clipped(at.ratio) * at.gain * at.logp, -clipped(at.ratio) * at.gain


def dro(at):
    apart = at.logp - at.old
    return -(at.logp * at.gain - 0.1 * apart**2), -(at.gain - 0.2 * apart)


def drgrpo(at):
    loss, slope = ppo(at)
    apart = at.reference - at.logp
    return loss + 0.3 * (math.exp(apart) - apart - 1), slope + 0.3 * (1 - math.exp(apart))


BY_HAND = {
    "cross_entropy": (cross_entropy, {}),
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, {}),
    "ppo, bounded": (bounded, {"eps_clip_c": 3.0}),
    "cispo": (cispo, {}),
    "dro": (dro, {"beta": 0.2}),
    "drgrpo": (drgrpo, {"kl_beta": 0.3}),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_and_their_gradients_are_those_computed_by_hand(name):
    told = given()
    logp_T = log_probs(told).requires_grad_()
    by_hand, params = BY_HAND[name]
    losses_T = token_losses(name.partition(",")[0], logp_T, told, params)
    losses_T.sum().backward()
    columns = (GAINS, logp_T.tolist(), told.logprobs_T.tolist(), told.reference_T.tolist())
    places = [At(*row) for row in zip(RATIOS, *columns, strict=True)]
    found = torch.tensor([by_hand(at) for at in places], dtype=torch.float64)
    values, slopes = (found * told.factors_T[:, None]).unbind(1)
    torch.testing.assert_close(losses_T.detach(), values, atol=1e-12, rtol=1e-12)
    assert logp_T.grad is not None
    torch.testing.assert_close(logp_T.grad, slopes, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", [*BY_HAND, "gspo"])
def test_what_stands_at_tokens_that_do_not_count_is_never_looked_at(name):
    factors = [0.0, 1.0, *FACTORS[2:]]
    none = float("nan")
    strange = {
        "factors_T": factors,
        "advantages_T": [none, *GAINS[1:]],
        "reference_T": [none, *given().reference_T[1:].tolist()],
        "low_T": [none] + [LOW] * 9,
        "high_T": [none] + [HIGH] * 9,
    }
    _, params = BY_HAND.get(name, (None, {}))
    found = []
    old = [-1e9, *given().logprobs_T[1:].tolist()]
    for told in (
        given(factors_T=factors),
        given(**strange, logprobs_T=old),
    ):
        logp_T = log_probs(given()).requires_grad_()
        if name == "gspo":
            losses = sequence_losses(logp_T, told, CLIPS, lambda x_T: x_T.sum()[None])
        else:
            losses = token_losses(name.partition(",")[0], logp_T, told, params)
        losses.sum().backward()
        found.append((losses.detach(), logp_T.grad))
    assert found[0][1][0] == 0
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(("bound", "limited"), [(0.0, 5), (3.0, 10)])
def test_a_ratio_that_overflows_has_no_gradient_where_it_is_clipped(bound, limited):
    # What is to be gained is clipped; what is to be lost is not, unless it is bounded.
    told = given(logprobs_T=[-1e4] * 10)
    logp_T = given().logprobs_T.requires_grad_()
    losses_T = token_losses("ppo", logp_T, told, {"eps_clip_c": bound})
    limits = [-(HIGH if gain > 0 else bound) * gain for gain in GAINS]
    expected = [limit * factor for limit, factor in zip(limits, FACTORS, strict=True)]
    assert losses_T[:limited].tolist() == pytest.approx(expected[:limited])
    assert losses_T[limited:].isinf().all()
    losses_T[:limited].sum().backward()
    assert logp_T.grad is not None
    assert logp_T.grad[:limited].tolist() == [0.0] * limited


def test_numbers_that_are_none_are_not_hidden_where_tokens_count():
    told = given(advantages_T=[float("nan"), *GAINS[1:]])
    for name in ("importance_sampling", "ppo", "cispo", "dro", "drgrpo"):
        losses_T = token_losses(name, log_probs(told), told, {"beta": 0.1, "kl_beta": 0.1})
        assert losses_T.isnan().tolist() == [True] + [False] * 9
    assert sequence_losses(log_probs(told), told, CLIPS, lambda x_T: x_T.sum()[None]).isnan().all()


@pytest.mark.parametrize("name", BY_HAND)
def test_a_log_probability_that_is_none_is_not_hidden(name):
    flawed_T = log_probs(given()).index_fill(0, torch.tensor([0]), float("nan"))
    params = {"beta": 0.1, "kl_beta": 0.1, "eps_clip_c": 3.0}
    losses_T = token_losses(name.partition(",")[0], flawed_T, given(), params)
    assert losses_T.isnan().tolist() == [True] + [False] * 9


def test_a_sequence_has_one_ratio_by_the_mean_of_its_tokens():
    # Two samples: tokens 0 to 3, and 4 to 9, of which one does not count.
    factors = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    told = given(factors_T=factors)
    sample_T = torch.tensor([0] * 4 + [1] * 6)
    logp_T = log_probs(told).requires_grad_()
    losses_N = sequence_losses(
        logp_T, told, CLIPS, lambda x_T: x_T.new_zeros(2).index_add(0, sample_T, x_T)
    )
    losses_N.sum().backward()
    expected, slopes = [], [0.0] * 10
    for tokens in ([0, 1, 2, 3], [4, 6, 7, 8, 9]):
        ratio = math.exp(sum(math.log(RATIOS[t]) for t in tokens) / len(tokens))
        parts = [surrogate(ratio, GAINS[t]) for t in tokens]
        expected.append(sum(loss for loss, _ in parts))
        for t, (_, slope) in zip(tokens, parts, strict=True):
            slopes[t] = slope
    torch.testing.assert_close(losses_N.detach(), torch.tensor(expected, dtype=torch.float64))
    assert logp_T.grad is not None
    torch.testing.assert_close(logp_T.grad, torch.tensor(slopes, dtype=torch.float64))


def test_clips_may_differ_from_token_to_token():
    told = given(low_T=[0.4] * 10, high_T=[2.0] * 10)
    wide_T = token_losses("ppo", log_probs(told), told, {})
    plain_T = token_losses("importance_sampling", log_probs(told), told, {})
    # Only the last ratio, 6, is beyond these.
    torch.testing.assert_close(wide_T[:9], plain_T[:9])


@pytest.mark.parametrize("gain", [1.5, -1.5])
@pytest.mark.parametrize("shift", [-0.4, 0.05, 0.4])
def test_one_advantage_for_a_sequence_moves_it_along_the_gradient_of_its_ratio(gain, shift):
    told = given(advantages_T=[gain] * 10, factors_T=[1.0] * 10)
    logp_T = (told.logprobs_T + shift * torch.linspace(0.5, 1.5, 10)).requires_grad_()
    sequence_losses(logp_T, told, CLIPS, lambda x_T: x_T.sum()[None]).sum().backward()
    through_T = logp_T.detach().clone().requires_grad_()
    ratio = (through_T - told.logprobs_T).mean().exp()
    torch.minimum(ratio * gain, ratio.clamp(LOW, HIGH) * gain).mul(-10).backward()
    torch.testing.assert_close(logp_T.grad, through_T.grad)


def test_a_sequence_whose_ratio_overflows_is_clipped_and_one_that_is_no_number_is_told():
    told = given(advantages_T=[1.5] * 10, factors_T=[1.0] * 10, logprobs_T=[-1e4] * 10)
    logp_T = torch.full((10,), -1.0, dtype=torch.float64, requires_grad=True)
    losses_N = sequence_losses(logp_T, told, CLIPS, lambda x_T: x_T.sum()[None])
    losses_N.sum().backward()
    assert losses_N.tolist() == pytest.approx([-HIGH * 15])
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [0.0] * 10
    flawed_T = log_probs(given()).index_fill(0, torch.tensor([0]), float("nan")).requires_grad_()
    sequence_losses(flawed_T, given(), CLIPS, lambda x_T: x_T.sum()[None]).sum().backward()
    assert flawed_T.grad is not None
    assert flawed_T.grad.isnan().any()
