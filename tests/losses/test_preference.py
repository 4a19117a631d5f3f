"""Losses of preferences: published numbers, limits, and gradients that stay finite."""

import json
import math
from pathlib import Path

import pytest
import torch

from penstock.config.schema.preference import AVERAGED, LossType, PreferenceConfig
from penstock.losses.preference import (
    LOSSES,
    PreferenceInputs,
    kl_baseline,
    length_normalize,
    preference_losses,
)
from penstock.losses.preference_metrics import MARGINS, metric_sums, metrics_by_name

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "preference_losses.json").read_text())
"""What other programs give for these log-probabilities, or their formulas do."""

NAMED = {
    "formula ernie/loss/dpo.py dpop (penalty OUTSIDE logsigmoid; PaddleFormers puts it inside)": {
        "loss_type": "dpop",
        "dpop_penalty": "outside",
        "dpop_lambda": 50.0,
    },
    "formula NxDT base_orpo.py": {"loss_type": "orpo", "pref_loss_ratio": 0.1, "beta": 0.1},
}
"""What is written for a vector whose own words are others."""


def written(vector) -> PreferenceConfig:
    words = dict(vector["cfg"])
    if "kl_beta" in words:
        words["beta"] = words.pop("kl_beta")
    return PreferenceConfig(**{**words, **NAMED.get(vector["source"], {})})


def column(vector, side: str) -> torch.Tensor:
    of_policy = vector.get(f"policy_{side}", vector.get(f"policy_{side}_avg"))
    policy = torch.tensor(of_policy, dtype=torch.float64)
    return policy - torch.tensor(vector.get(f"ref_{side}", [0.0] * len(policy)), dtype=policy.dtype)


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_a_loss_is_what_others_give(number):
    vector = VECTORS[number]
    how = written(vector)
    ratios_DA = torch.stack([column(vector, "chosen"), column(vector, "rejected")], dim=1)
    gap = vector.get("score_delta")
    answers = PreferenceInputs(
        ratios_DA,
        kl_baseline(ratios_DA.sum(0), torch.tensor(len(ratios_DA))),
        score_gap_D=torch.tensor(gap, dtype=torch.float64) if gap else None,
    )
    found = how.pref_loss_ratio * preference_losses(answers, how).mean()
    if how.sft_weight:
        # The vector's answers are means already, each of one "token".
        found -= how.sft_weight * ratios_DA[:, 0].mean()
    assert found.item() == pytest.approx(vector["loss"], rel=1e-12)


def test_the_vectors_cover_the_losses_of_pairs_that_others_have():
    covered = {written(vector).loss_type for vector in VECTORS}
    assert set(LOSSES) - covered == {"cpo", "kto"}  # TRL's are the judge of these


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("at", [0.0, -1e-4, -5000.0])
def test_gradients_are_finite_wherever_a_model_is(loss: LossType, at):
    ratios_DA = torch.tensor([[at, -2.0], [-2.0, at]], dtype=torch.float64, requires_grad=True)
    answers = PreferenceInputs(ratios_DA, torch.zeros(2), torch.tensor([True, False]))
    preference_losses(answers, PreferenceConfig(loss_type=loss)).sum().backward()
    assert ratios_DA.grad is not None
    assert ratios_DA.grad.isfinite().all()


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"kto"}))
def test_a_step_against_the_gradient_widens_the_margin(loss: LossType):
    # Both unlikely, as answers are, and equal.
    ratios_DA = torch.full((1, 2), -1.0, dtype=torch.float64, requires_grad=True)
    answers = PreferenceInputs(ratios_DA, torch.zeros(2, dtype=torch.float64))
    preference_losses(answers, PreferenceConfig(loss_type=loss)).sum().backward()
    assert ratios_DA.grad is not None
    chosen, rejected = ratios_DA.grad[0]
    assert rejected > chosen


@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0])
def test_kto_subtracts_the_kl_estimate_of_the_mismatched_answers(shift: float):
    ratios_DA = torch.tensor([[1.5, 9.0], [-0.5, 9.0]], dtype=torch.float64)
    kl_A = torch.tensor([7.0, shift], dtype=torch.float64)
    how = PreferenceConfig(loss_type="kto", beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    found = preference_losses(PreferenceInputs(ratios_DA, kl_A, torch.tensor([True, False])), how)
    good = 1.5 * (1 - 1 / (1 + math.exp(-0.4 * (1.5 - shift))))
    bad = 0.5 * (1 - 1 / (1 + math.exp(-0.4 * (shift + 0.5))))
    assert found.tolist() == pytest.approx([good, bad], rel=1e-12)


def test_the_kl_estimate_is_the_mean_of_each_column_and_at_least_zero():
    found = kl_baseline(torch.tensor([6.0, -3.0, 1.0]).double(), torch.tensor(4.0))
    assert found.tolist() == [1.5, 0.0, 0.25]


def test_lengths_are_taken_out_as_written():
    sums_DA, tokens_DA = torch.tensor([[-6.0, -4.0]]), torch.tensor([[3, 1]])
    assert torch.equal(length_normalize(sums_DA, tokens_DA, "none"), sums_DA)
    assert torch.equal(length_normalize(sums_DA, tokens_DA, "mean"), torch.tensor([[-2.0, -4.0]]))
    assert torch.equal(
        length_normalize(sums_DA, tokens_DA, "pair_mean"), torch.tensor([[-4.0, -8.0]])
    )


def test_means_are_taken_where_a_loss_is_defined_on_them():
    means = {loss for loss in LOSSES if PreferenceConfig(loss_type=loss).normalization == "mean"}
    assert means == AVERAGED


def test_pairs_are_measured_one_by_one():
    policy_DA = torch.tensor([[-3.0, -5.0], [-8.0, -2.0]], dtype=torch.float64)
    ratios_DA = torch.tensor([[1.0, -1.0], [-2.0, 4.0]], dtype=torch.float64)
    tokens_DA, losses_D = torch.tensor([[2, 1], [3, 9]]), torch.tensor([1.0, 5.0]).double()
    how = PreferenceConfig(beta=0.5)
    sft = policy_DA[:, 0], tokens_DA[:, 0]
    found = metrics_by_name(metric_sums(policy_DA, ratios_DA, losses_D, sft, None, how).tolist())
    assert found == {
        "rewards/chosen": -0.25,
        "rewards/rejected": 0.75,
        "rewards/accuracies": 0.5,
        "logps/chosen": -5.5,
        "logps/rejected": -3.5,
        "preference_loss": 3.0,
        "sft_loss": 11 / 5,
        MARGINS: -1.0,
    }


def test_judged_answers_are_measured_by_how_they_are_judged():
    policy_DA = torch.tensor([[-3.0, 0.0], [-8.0, 0.0]], dtype=torch.float64)
    ratios_DA = torch.tensor([[1.0, 9.0], [-2.0, 9.0]], dtype=torch.float64)
    tokens_DA, losses_D = torch.tensor([[2, 1], [3, 9]]), torch.tensor([1.0, 5.0]).double()
    how, desirable_D = PreferenceConfig(loss_type="kto", beta=0.5), torch.tensor([True, False])
    sft = policy_DA[:, 0] * desirable_D, tokens_DA[:, 0] * desirable_D
    found = metrics_by_name(
        metric_sums(policy_DA, ratios_DA, losses_D, sft, desirable_D, how).tolist()
    )
    assert found == {
        "rewards/chosen": 0.5,
        "rewards/rejected": -1.0,
        "logps/chosen": -3.0,
        "logps/rejected": -8.0,
        "preference_loss": 3.0,
        "sft_loss": 1.5,
        MARGINS: 1.5,
    }
