"""Releases that cannot come about are refused, and what better means is what is written."""

import math
from typing import Any

import pytest

from penstock.config.loading.load import loads
from penstock.pipeline.releasing import Figures, is_better, release_location
from tests.config.values import faults_of, refused_and_mended, smallest

HELD_OUT = {"data": {"val_set_size": 5}}


def release(**fields: Any) -> dict[str, Any]:
    return {**HELD_OUT, "release": {"name": "bot", **fields}}


# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"release": {"min_delta": 0.1}},
        "release.min_delta",
        "nothing is released without release.name",
        release(),
    ),
    (
        release(train_when="always", min_new_samples=5),
        "release.min_new_samples",
        "is not used with train_when: always",
        release(train_when="new_samples"),
    ),
    (
        release(metric=None, mode="max"),
        "release.mode",
        "is not used with metric: null",
        release(metric="eval_loss"),
    ),
    (
        release(metric="rouge"),
        "release.metric",
        "rouge is not a metric of evaluations; write eval_loss",
        release(metric="eval_loss/chats"),
    ),
    (
        {"release": {"name": "bot"}},
        "release.metric",
        "there is no data to compare models on",
        {"release": {"metric": None}},
    ),
    (
        {**release(), "train": {"eval_max_batches": 0}},
        "train.eval_max_batches",
        "0 evaluates nothing",
        {"train": {"eval_max_batches": 3}},
    ),
    (
        {**release(), "pipeline": {"stages": ["prepare", "pack", "train"]}},
        "release.name",
        "with pipeline.stages without export there is no model to release",
        {"pipeline": {"stages": ["prepare", "pack", "train", "export"]}},
    ),
    (
        {**release(), "export": {"quantise": "fp8"}},
        "export.quantise",
        "needs weights that are not quantized",
        {"release": {"metric": None, "start_from": "model"}},
    ),
    (
        {"data": {"val_set_size": 5, "skip_prepare_dataset": True}, "release": {"name": "bot"}},
        "data.skip_prepare_dataset",
        "releases follow changes of the sources",
        {"data": {"skip_prepare_dataset": False}},
    ),
    (
        {**release(), "train": {"load_checkpoint_path": "out/checkpoints/global_step_1"}},
        "train.load_checkpoint_path",
        "every run would start from this checkpoint",
        {"train": {"load_checkpoint_path": "auto"}},
    ),
    (
        {**release(), "train": {"init_checkpoint_path": "builtin:tiny-qwen3"}},
        "train.init_checkpoint_path",
        "every run would start from this checkpoint",
        {"train": {"init_checkpoint_path": None}},
    ),
    (
        {
            **release(),
            "train": {"load_checkpoint_path": "auto", "require_checkpoint": True},
        },
        "train.require_checkpoint",
        "each run has a new folder",
        {"train": {"require_checkpoint": False}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_a_release_that_cannot_be_is_refused_and_mended_by_what_is_proposed(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended(sections, where, reason, mended)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "-x"])
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    [line] = faults_of(**HELD_OUT, release={"name": name})
    assert line.startswith("release.name: ")


@pytest.mark.parametrize(
    ("wish", "new", "old", "better"),
    [
        ({}, 1.0, 1.1, True),
        ({}, 1.0, 1.0, False),
        ({"min_delta": 0.25}, 1.0, 1.25, False),
        ({"min_delta": 0.25}, 1.0, 1.5, True),
        ({"mode": "max"}, 1.0, 1.1, False),
        ({"metric": "eval_token_accuracy"}, 0.6, 0.5, True),
        ({"metric": "eval_token_accuracy", "mode": "min"}, 0.6, 0.5, False),
        ({}, 9.0, None, True),
        ({}, math.nan, None, False),
        ({}, math.nan, 1.0, False),
        ({}, 9.0, math.nan, True),
    ],
)
def test_a_model_is_better_by_more_than_is_written(
    wish: dict[str, Any], new: float, old: float | None, better: bool
) -> None:
    run = loads(smallest(**release(**wish)))
    assert is_better(run, Figures(run.release.metric or "", new, old, {}, {})) is better


def test_releases_lie_below_the_artifacts_here_and_behind_a_url() -> None:
    here = loads(smallest(**release(), pipeline={"artifacts_path": "made"}))
    assert release_location(here) == "made/releases/bot"
    there = loads(smallest(**release(), pipeline={"artifacts_path": "s3://bucket/made"}))
    assert release_location(there) == "s3://bucket/made/releases/bot"
