"""Wishes for evaluations that cannot be met are refused with the reason and the way out."""

from typing import Any

import pytest

from penstock.config.loading.load import loads
from tests.config.values import faults_of, refused_and_mended, smallest

HELD_OUT = {"data": {"val_set_size": 5}}
BEST = {"save_best": {"metric": "eval_loss"}}
PATIENT = {"early_stopping": {"patience": 2}}


def held_out(**train: Any) -> dict[str, Any]:
    return {**HELD_OUT, "train": train}


# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"train": {"eval_steps": 5}},
        "train.eval_steps",
        "there is nothing to evaluate on; write data.val_set_size or data.test_datasets",
        {"data": {"test_datasets": [{"path": "x"}]}},
    ),
    (
        {"train": {"eval_only": True}},
        "train.eval_only",
        "there is nothing to evaluate on",
        HELD_OUT,
    ),
    (
        {"train": {"eval_max_batches": 0.5}},
        "train.eval_max_batches",
        "there is nothing to evaluate on",
        HELD_OUT,
    ),
    (
        held_out(eval_rows_per_batch=4),
        "train.eval_rows_per_batch",
        "there is no number of batches",
        {"train": {"eval_max_batches": 2}},
    ),
    (
        held_out(**BEST),
        "train.save_best.metric",
        "write train.eval_steps or train.eval_epochs, or leave metric out",
        {"train": {"eval_epochs": 0.5}},
    ),
    (
        held_out(**PATIENT),
        "train.early_stopping.patience",
        "write train.eval_steps or train.eval_epochs, or leave patience out",
        {"train": {"eval_steps": 10}},
    ),
    (
        held_out(eval_steps=1, save_best={"metric": "loss"}),
        "train.save_best.metric",
        "loss is not a metric of evaluations",
        {"train": {"save_best": {"metric": "eval_loss/poems"}}},
    ),
    (
        held_out(eval_steps=1, eval_max_batches=0, **PATIENT),
        "train.eval_max_batches",
        "0 evaluates nothing",
        {"train": {"eval_max_batches": 1}},
    ),
    (
        {"train": {"early_stopping": {"min_delta": 0.1}}},
        "train.early_stopping.min_delta",
        "patience: 0 disables early stopping",
        {"train": {"early_stopping": {}}},
    ),
    (
        {"train": {"save_best": {"mode": "max"}}},
        "train.save_best.mode",
        "is max, but no metric is set",
        {"train": {"save_best": {}}},
    ),
    (
        {
            **held_out(eval_only=True),
            "pipeline": {"stages": ["prepare", "pack", "train", "export"]},
        },
        "train.eval_only",
        "trains nothing, so there is nothing for export",
        {"pipeline": {"stages": ["prepare", "pack", "train"]}},
    ),
    (
        held_out(eval_only=True, eval_steps=1, **BEST),
        "train.save_best.metric",
        "has no effect with eval_only: true",
        {"train": {"save_best": {}}},
    ),
    (
        {"train": {"sample_steps": 5}},
        "train.sample_steps",
        "there are no prompts",
        {"train": {"sample_prompts": ["Why?"]}},
    ),
    (
        {"train": {"sample_prompts": ["Why?", " "]}},
        "train.sample_prompts.1",
        "is empty; write a prompt",
        {"train": {"sample_prompts": ["Why?", "How?"]}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_a_wish_that_cannot_be_met_is_refused_and_mended(sections, where, reason, mended):
    refused_and_mended(sections, where, reason, mended)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_train_epochs", 0, "is 0; write a number above 0"),
        ("num_train_epochs", -0.5, "is -0.5; write a number above 0"),
        ("eval_max_batches", 1.5, "is 1.5; write a whole number of batches (10), or a fraction"),
        ("eval_max_batches", -1, "is -1; write a whole number of batches"),
    ],
)
def test_a_number_out_of_its_range_is_refused(field, value, words):
    [line] = faults_of(**HELD_OUT, train={field: value})
    assert line.startswith(f"train.{field}: {words}")


def test_data_that_is_prepared_already_may_hold_some_out():
    sections = {"data": {"skip_prepare_dataset": True}, "train": {"eval_steps": 5}}
    assert loads(smallest(**sections)).train.eval_steps == 5


def test_a_run_that_only_evaluates_exports_and_pushes_nothing():
    sections = {**held_out(eval_only=True), "push": {"url": "file:///models"}}
    assert loads(smallest(**sections)).stages == ("prepare", "pack", "train")
