"""Settings of objectives that cannot be honoured are refused with what to write instead."""

from typing import Any, get_args

import pytest

from penstock.config.loading.load import loads
from penstock.config.schema.preference import REFERENCE_FREE, LossType, PreferenceConfig, is_used
from tests.config.values import faults_of, refused_and_mended, smallest

PAIRS = {"datasets": [{"path": "pairs", "type": "preference"}]}
LEARNT = {"data": PAIRS, "train": {"objective": "preference"}}
SCORED = {
    "path": "pairs",
    "type": "preference",
    "field_chosen_score": "good",
    "field_rejected_score": "bad",
}
UNSCORED = {"field_chosen_score": None}
FIRST = "data.datasets.0.type"


def texts(*types: str) -> dict[str, Any]:
    return {"datasets": [{"path": "a", "type": its} for its in types]}


# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"preference": {"beta": 0.2}},
        "preference.beta",
        "is not used with train.objective: sft",
        LEARNT,
    ),
    (
        {**LEARNT, "data": texts("chat")},
        FIRST,
        "chat has no preference pairs",
        {"data": PAIRS},
    ),
    (
        {**LEARNT, "preference": {"loss_type": "kto"}},
        FIRST,
        "preference has no rated completions",
        {"data": texts("kto")},
    ),
    (
        {"train": {"objective": "pretrain"}, "data": texts("text", "chat")},
        "data.datasets.1.type",
        "chat is not plain text",
        {"data": texts("text")},
    ),
    (
        {
            "train": {"objective": "pretrain"},
            "data": {**texts("text"), "mask_eos_in_loss": True},
        },
        "data.mask_eos_in_loss",
        "trains on all",
        {"data": {"mask_eos_in_loss": False}},
    ),
    *(
        (
            {**LEARNT, "train": {"objective": "preference", name: 0.1}},
            f"train.{name}",
            "is a term of the token loss",
            {"train": {name: 0.0}},
        )
        for name in ("label_smoothing", "z_loss_coef")
    ),
    (
        {**LEARNT, "preference": {"offset_alpha": 0.5}},
        "preference.offset_alpha",
        "needs scores of completions",
        {"data": {"datasets": [SCORED]}},
    ),
    (
        {**LEARNT, "data": {"datasets": [{**SCORED, "field_rejected_score": None}]}},
        "data.datasets.0.field_rejected_score",
        "is not set, but other columns of scores are",
        {"data": {"datasets": [SCORED]}},
    ),
    (
        {**LEARNT, "data": {"datasets": [SCORED], "test_datasets": [{**SCORED, **UNSCORED}]}},
        "data.test_datasets.0.field_chosen_score",
        "in every data set, or in none",
        {"data": {"test_datasets": [SCORED]}},
    ),
    (
        {**LEARNT, "data": {"datasets": [SCORED, {"path": "turns", "type": "preference_turns"}]}},
        "data.datasets.1.type",
        "preference_turns has no scores",
        {"data": {"datasets": [SCORED]}},
    ),
    (
        {"data": {"datasets": [{"path": "a", "type": "chat", "field_chosen_score": "x"}]}},
        "data.datasets.0.field_chosen_score",
        "type chat has no scores",
        {"data": {"datasets": [{"path": "a", "type": "chat"}]}},
    ),
    (
        {
            "train": {"objective": "preference"},
            "data": texts("kto"),
            "preference": {"loss_type": "kto", "length_normalize": "pair_mean"},
        },
        "preference.length_normalize",
        "loss_type: kto has single completions, not pairs",
        {"preference": {"length_normalize": "mean"}},
    ),
    (
        {**LEARNT, "preference": {"loss_type": "simpo", "length_normalize": "none"}},
        "preference.length_normalize",
        "loss_type: simpo is defined with means",
        {"preference": {"length_normalize": "mean"}},
    ),
    (
        {**LEARNT, "preference": {"sft_loss_scope": "prompt_and_answer"}},
        "preference.sft_loss_scope",
        "there is no SFT loss without sft_loss_ratio",
        {"preference": {"sft_loss_ratio": 0.5}},
    ),
    (
        {
            "train": {"objective": "preference"},
            "data": texts("kto"),
            "preference": {"loss_type": "kto", "kl_rotation_size": 4},
        },
        "preference.kl_rotation_size",
        "is used with kl_pairing: rotate only",
        {"preference": {"kl_pairing": "rotate"}},
    ),
    (
        {**LEARNT, "preference": {"ref_update_steps": 5}, "lora": {"enable_lora": True}},
        "preference.ref_update_steps",
        "with adapters the reference model is the frozen base",
        {"lora": {"enable_lora": False}},
    ),
    (
        {**LEARNT, "preference": {"ref_update_steps": 5, "reference_free": True}},
        "preference.ref_update_steps",
        "there is no reference model",
        {"preference": {"ref_update_steps": -1}},
    ),
    (
        {**LEARNT, "preference": {"ref_update_steps": 0}},
        "preference.ref_update_steps",
        "write -1 for never",
        {"preference": {"ref_update_steps": -1}},
    ),
    (
        {**LEARNT, "preference": {"pref_loss_ratio": 0.0}},
        "preference.pref_loss_ratio",
        "both losses have weight 0",
        {"preference": {"sft_loss_ratio": 1.0}},
    ),
    (
        {**LEARNT, "preference": {"precompute_ref_logps": False}},
        "preference.precompute_ref_logps",
        "always computed before training",
        {"preference": {"precompute_ref_logps": True}},
    ),
    (
        {
            **LEARNT,
            "pipeline": {"stages": ["pack", "reference"]},
            "preference": {"loss_type": "or"},
        },
        "pipeline.stages",
        "leave reference out",
        {"pipeline": {"stages": ["pack"]}},
    ),
    (
        {
            **LEARNT,
            "data": {**PAIRS, "val_set_size": 5},
            "train": {
                "objective": "preference",
                "eval_steps": 5,
                "early_stopping": {"patience": 2, "metric": "eval_perplexity"},
            },
        },
        "train.early_stopping.metric",
        "eval_rewards/margins",
        {"train": {"early_stopping": {"patience": 2, "metric": "eval_rewards/accuracies"}}},
    ),
    (
        {
            "data": {**texts("kto"), "val_set_size": 5},
            "train": {
                "objective": "preference",
                "eval_steps": 5,
                "save_best": {"metric": "eval_rewards/accuracies"},
            },
            "preference": {"loss_type": "kto"},
        },
        "train.save_best.metric",
        "eval_rewards/margins",
        {"train": {"save_best": {"metric": "eval_rewards/margins"}}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_an_impossible_combination_is_refused_and_mended(sections, where, reason, mended):
    refused_and_mended(sections, where, reason, mended)


UNUSED = {
    "beta": 0.5,
    "label_smoothing": 0.1,
    "simpo_gamma": 1.0,
    "dpop_lambda": 5.0,
    "dpop_penalty": "outside",
    "desirable_weight": 2.0,
    "undesirable_weight": 2.0,
    "kl_pairing": "rotate",
    "kl_rotation_size": 4,
    "reference_free": True,
}
"""A value other than the default, for every field that some losses do not use."""


@pytest.mark.parametrize("name", UNUSED)
def test_a_field_that_the_loss_does_not_use_is_refused(name):
    for loss in ("sigmoid", "nca_pair", "or"):
        sections = {**LEARNT, "preference": {"loss_type": loss, name: UNUSED[name]}}
        if is_used(name, loss):
            loads(smallest(**sections))
        else:
            [line] = faults_of(**sections)
            assert line.startswith(f"preference.{name}: loss_type: {loss} does not use it")


def test_every_field_that_some_losses_do_not_use_is_tried():
    losses = get_args(LossType)
    some = {
        name
        for name in PreferenceConfig.model_fields
        if not all(is_used(name, loss) for loss in losses)
    }
    assert some - {"offset_alpha"} == set(UNUSED)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", *sorted(REFERENCE_FREE)])
def test_a_run_has_a_reference_stage_where_its_loss_compares_with_one(loss: LossType):
    run = loads(smallest(**LEARNT, preference={"loss_type": loss}))
    assert ("reference" in run.stages) == (loss not in REFERENCE_FREE)


def test_a_run_that_is_free_of_a_reference_has_no_stage_for_it():
    assert "reference" not in loads(smallest(**LEARNT, preference={"reference_free": True})).stages
