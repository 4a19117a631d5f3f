"""Every field of the section `preference` is in the loss that a step tells."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.config.schema.preference import PreferenceConfig
from penstock.losses.preference import (
    PreferenceInputs,
    kl_baseline,
    length_normalize,
    preference_losses,
)
from tests.engine import loops, runs
from tests.engine.inputs import MODELS, SHAPE
from tests.engine.laid import alone
from tests.engine.losses.answering import random_samples, scores_of, write_answers, write_reference
from tests.ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]

JUDGED = random_samples(12, runs.VOCAB, judged=True)
"""Of pairs the judgement is left out. They fill the rows of one step."""

GAPS = [0.25 * number for number in range(len(JUDGED))]
"""By how much the first answers are scored higher."""

SCORES = {"field_chosen_score": "good", "field_rejected_score": "bad"}

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "beta": {"beta": 0.7},
    "label_smoothing": {"label_smoothing": 0.2},
    "offset_alpha": {"offset_alpha": 0.5},
    "pref_loss_ratio": {"pref_loss_ratio": 0.3},
    "sft_loss_ratio": {"sft_loss_ratio": 0.4},
    "sft_loss_scope": {"sft_loss_ratio": 0.4, "sft_loss_scope": "prompt_and_answer"},
    "kto, sft_loss_scope": {
        **{"loss_type": "kto", "sft_loss_ratio": 0.5, "sft_loss_scope": "prompt_and_answer"}
    },
    "reference_free": {"reference_free": True},
    "mean": {"length_normalize": "mean"},
    "pair_mean": {"length_normalize": "pair_mean"},
    "hinge": {"loss_type": "hinge"},
    "dpop": {"loss_type": "dpop"},
    "dpop_lambda": {"loss_type": "dpop", "dpop_lambda": 3.0},
    "dpop_penalty": {"loss_type": "dpop", "dpop_lambda": 3.0, "dpop_penalty": "outside"},
    "sppo_hard": {"loss_type": "sppo_hard"},
    "nca_pair": {"loss_type": "nca_pair"},
    "kto_pair": {"loss_type": "kto_pair"},
    "cpo": {"loss_type": "cpo"},
    "simpo": {"loss_type": "simpo"},
    "simpo_gamma": {"loss_type": "simpo", "simpo_gamma": 3.0},
    "or": {"loss_type": "or"},
    "kto": {"loss_type": "kto"},
    "kto, sft": {"loss_type": "kto", "sft_loss_ratio": 0.5},
    "desirable_weight": {"loss_type": "kto", "desirable_weight": 2.0},
    "undesirable_weight": {"loss_type": "kto", "undesirable_weight": 2.0},
}


def first_record(job) -> dict[str, Any]:
    return loops.step(loops.loop_of(job))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the model and its reference make of the answers, and what each run tells of them."""
    folder = tmp_path_factory.mktemp("fields")
    config = transformers.AutoConfig.for_model(**{**runs.TINY, **SHAPE, **MODELS["tied"]})
    config.dtype = torch.float32
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "tied")
    policy = scores_of(model, JUDGED)
    # The model has moved away from the reference, so the KL estimate is above 0.
    reference = policy + np.random.default_rng(0).normal(-0.5, 1.0, size=policy.shape)
    for kind in ("preference", "kto"):
        is_judged = kind == "kto"
        samples = JUDGED
        if not is_judged:
            samples = [
                replace(each, desirable=None, score_gap=gap)
                for each, gap in zip(JUDGED, GAPS, strict=True)
            ]
        write_answers(folder / kind, samples)
        write_reference(folder / kind / "scores", samples, reference)
    jobs = {name: job_of(folder, name, its) for name, its in SETTINGS.items()}
    [told] = on_ranks(1, loops.each, first_record, jobs, timeout=200)
    prompts = np.array([prompt_log_prob(model, each.prompt) for each in JUDGED])
    return policy, prompts, reference, told


@torch.no_grad()
def prompt_log_prob(model, prompt) -> float:
    """Of all tokens of a prompt but the first, which nothing precedes."""
    ids = torch.tensor([prompt])
    log_probs = model(ids).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None]).double().sum().item()


def job_of(folder, name, preference):
    kind = "kto" if preference.get("loss_type") == "kto" else "preference"
    job = alone("tied").job(
        folder,
        f"run {name}",
        objective="preference",
        data={
            "pad_to_multiple_of": 1,
            "datasets": [
                {"path": "dummy", "type": kind, **(SCORES if "offset_alpha" in preference else {})}
            ],
        },
        preference=preference,
    )
    scores = folder / kind / "scores" if job.config.preference.has_reference else None
    return replace(job, packed_dir=folder / kind, ref_logprobs=scores)


def loss_of(policy, prompts, reference, how: PreferenceConfig) -> float:
    """By hand, from what transformers' model says of each answer."""
    tokens = torch.tensor([[len(answer) for answer in each.answers] for each in JUDGED])
    policy_DA = torch.from_numpy(policy)
    reference_DA = torch.from_numpy(reference) * how.has_reference
    ratios_DA = length_normalize(policy_DA - reference_DA, tokens, how.normalization)
    desirable_D = torch.tensor([bool(each.desirable) for each in JUDGED])
    start_A = kl_baseline(ratios_DA.sum(0), torch.tensor(len(JUDGED)))
    answers = PreferenceInputs(ratios_DA, start_A, desirable_D, torch.tensor(GAPS))
    loss = preference_losses(answers, how).mean()
    good_D = desirable_D if how.loss_type == "kto" else torch.ones_like(desirable_D)
    learnt_D, tokens_D = policy_DA[:, 0], tokens[:, 0]
    if how.sft_loss_scope == "prompt_and_answer":
        learnt_D = learnt_D + torch.from_numpy(prompts)
        tokens_D = tokens_D + torch.tensor([len(each.prompt) - 1 for each in JUDGED])
    learnt = -learnt_D[good_D].sum() / tokens_D[good_D].sum()
    return (how.pref_loss_ratio * loss + how.sft_weight * learnt).item()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_tells_the_loss_that_is_written(name, answers):
    policy, prompts, reference, told = answers
    wanted = loss_of(policy, prompts, reference, PreferenceConfig(**SETTINGS[name]))
    assert told[name]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_every_setting_gives_another_loss(answers):
    *_, told = answers
    losses = [round(record["loss"], 6) for record in told.values()]
    assert len(set(losses)) == len(losses)


def test_rewards_are_what_the_model_has_moved_from_its_reference(answers):
    policy, _, reference, told = answers
    chosen, rejected = (0.1 * (policy - reference)).T
    record = told["as it is"]
    assert record["rewards/chosen"] == pytest.approx(chosen.mean(), abs=1e-5)
    assert record["rewards/rejected"] == pytest.approx(rejected.mean(), abs=1e-5)
    assert record["rewards/margins"] == pytest.approx((chosen - rejected).mean(), abs=1e-5)
    assert record["rewards/accuracies"] == np.mean(chosen > rejected)
    assert record["logps/chosen"] == pytest.approx(policy[:, 0].mean(), rel=1e-6)
