"""A run that is made longer in its own folder ends as one that was that long from its start."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.api.status import stage_statuses
from penstock.config.loading.load import load
from penstock.core.cache.manifest import MANIFEST
from penstock.core.errors import PenstockError
from penstock.pipeline.plan import Plan, RebuildOptions, execute_stage, plan
from penstock.train.metrics.jsonl import read_metrics
from tests.pipeline.runs import sealed, write_run
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = [pytest.mark.dist, pytest.mark.slow]

DATA = {"val_set_size": 8, "sample_packing_sequence_len": 64}
TRAIN = {"max_steps": 3, "save_steps": 0, "save_hf_weights": False, "eval_steps": 0}


def planned_run(folder: Path, data: dict | None = None, **train: object) -> Plan:
    shared = folder.parent / "prepared"
    config = write_run(
        folder,
        train={**TRAIN, **train},
        data={"dataset_prepared_path": str(shared), **DATA, **(data or {})},
    )
    return plan(load(config), ("train",), ranks="this_process")


def foreseen(folder: Path, **train: Any) -> str:
    """What a plan says of the train stage."""
    return "\n".join(stage_statuses(planned_run(folder, **train))[-1].reasons)


def trained(folder: Path, **train: Any) -> tuple[str, str]:
    """The status of the train stage, or its error, and what was said of it."""
    planned, heard = planned_run(folder, **train), []
    status = ""
    try:
        for step in planned.steps:
            status = execute_stage(step, planned.run, RebuildOptions(), heard.append).status
    except PenstockError as error:
        status = str(error)
    return status, "\n".join(heard)


def result(folder: Path) -> object:
    return sealed(folder)[f"out/{MANIFEST}"]


FOLLOWS = {"lr_decay_style": "linear"}

LENGTHENED = {
    "epochs": [{"max_steps": None, "num_train_epochs": each} for each in (0.5, 1, 2)],
    "the best checkpoint": [
        {"max_steps": each, "eval_steps": 2, "save_best": {"metric": "eval_loss"}}
        for each in (4, 8)
    ],
    "tokens": [{"max_steps": None, "max_tokens": each} for each in (500, 1500)],
    "a schedule that no length changes": [
        {"lr_decay_style": "inverse_sqrt", "lr_warmup_steps": 2, "max_steps": each}
        for each in (3, 7)
    ],
    "a decay that begins after the steps done": [
        {"max_steps": 4},
        {"max_steps": 8, "lr_decay_style": "wsd", "lr_schedule_kwargs": {"decay_steps": 3}},
    ],
    "a linear decay that ends at the same step": [
        {"max_steps": 4, **FOLLOWS},
        {"max_steps": 8, **FOLLOWS, "lr_decay_ratio": 0.5},
    ],
}


def losses(folder: Path) -> list[tuple[int, float]]:
    records = read_metrics(folder / "out" / "metrics.jsonl")
    return [(r["step"], r["loss"]) for r in records if "loss" in r]


def lengthened(folder: Path, lengths: list[dict]) -> None:
    statuses = []
    for train in lengths:
        said = foreseen(folder / "grows", **train)
        assert ("train: it goes on from" in said) == bool(statuses), said
        statuses.append(trained(folder / "grows", **train)[0])
    assert statuses == ["ran"] + ["resumed"] * (len(lengths) - 1), statuses
    assert trained(folder / "grows", **lengths[-1])[0] == "cached"
    assert trained(folder / "whole", **lengths[-1])[0] == "ran"
    assert result(folder / "grows") == result(folder / "whole")
    assert losses(folder / "grows") == losses(folder / "whole")


@one_day_in(2, of=1)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(lengths, id=name, marks=[] if name == "epochs" else pytest.mark.exhaustive)
        for name, lengths in LENGTHENED.items()
    ],
)
def test_a_lengthened_run_has_the_bytes_of_one_that_had_the_new_length_from_the_start(
    tmp_path, lengths
):
    on_ranks(1, lengthened, tmp_path, lengths)


def without_checkpoint(out: Path) -> None:
    shutil.rmtree(out / "checkpoints/global_step_3")


REFUSED = {
    "a decay to the end": (FOLLOWS, {**FOLLOWS, "max_steps": 5}, "follows the length of the run"),
    "a warmup by ratio": (
        {"lr_warmup_ratio": 0.7},
        {"lr_warmup_ratio": 0.7, "max_steps": 9},
        "step 2 had 0.005 and would have 0.00166667",
    ),
    "a decay and tokens": (
        FOLLOWS,
        {**FOLLOWS, "max_steps": None, "max_tokens": 900},
        "train.max_tokens decides how many steps that is",
    ),
    "a shorter run": ({}, {"max_steps": 2}, "it has taken 3 steps, and the new settings end aft"),
    "no optimizer states": (
        {"save_optimizer": False},
        {"save_optimizer": False, "max_steps": 5},
        "train.save_optimizer: false",
    ),
    "an evaluation of the end": (
        {"eval_steps": 2, "save_best": {"metric": "eval_loss"}},
        {"eval_steps": 2, "save_best": {"metric": "eval_loss"}, "max_steps": 5},
        "it was evaluated after step 3 because it ended there",
    ),
    "other data": (
        {},
        {"max_steps": 5, "data": {"sample_packing_sequence_len": 48}},
        "its packed rows are others",
    ),
    "epochs that are drawn together": (
        {"max_steps": None, "num_train_epochs": 1, "data": {"mix_strategy": "random"}},
        {"max_steps": None, "num_train_epochs": 2, "data": {"mix_strategy": "random"}},
        "data.mix_strategy random draws the data of all train.num_train_epochs together",
    ),
    "no checkpoint": ({}, {"max_steps": 5}, "that needs its checkpoint of step 3 in"),
}


UNPACKED = ("other data", "epochs that are drawn together")
"""Their rows are not packed yet when the run is planned."""


def refused(folder: Path) -> None:
    for name, (shorter, longer, message) in REFUSED.items():
        here = folder / name
        status, _ = trained(here, **shorter)
        assert status == "ran", (name, status)
        before = result(here)
        if name == "no checkpoint":
            without_checkpoint(here / "out")
        assert "it cannot be lengthened: " in foreseen(here, **longer) or name in UNPACKED
        status, _ = trained(here, **longer)
        assert "holds a finished run of another key" in status, name
        assert "It cannot be lengthened: " in status, status
        assert message in " ".join(status.split()), status
        if name != "no checkpoint":
            assert result(here) == before
            assert trained(here, **shorter)[0] == "cached", name


@pytest.mark.exhaustive
def test_a_run_whose_first_steps_would_be_others_is_refused_with_the_reason(tmp_path):
    on_ranks(1, refused, tmp_path, timeout=200)
