"""Profiles of a run's steps, as files that the tools for them open."""

import gzip
import json
from functools import cache

import pytest

from tests.engine import runs
from tests.engine.loops import each
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    runs.write_rows(folder / "packed", 8)
    runs.write_config(folder / "model")
    (folder / "a file").write_text("in the way")
    return folder


BARE = {
    "profile_record_shapes": False,
    "profile_profile_memory": False,
    "profile_with_stack": False,
}
WISHES = {
    "one step, everything": {"save_steps": 3},
    "one step, bare": BARE,
    "two steps, all ranks": {**BARE, "profile_end_step": 3, "profile_rank0_only": False},
    "from the start, past the end": {**BARE, "profile_start_step": 0, "profile_end_step": 9},
    "nowhere": {**BARE, "profile_trace_dir": "a file"},
    "off": {"enable_profiling": False},
}


@pytest.fixture(scope="module")
def profiled(folder):
    """The folder of each run's profiles, of two ranks."""
    jobs = {}
    for name, wishes in WISHES.items():
        train = {"enable_profiling": True, "profile_trace_dir": name, **wishes}
        train["profile_trace_dir"] = str(folder / train["profile_trace_dir"])
        run = runs.run_config(
            folder / f"out {name}", folder / "model", max_steps=4, data_parallel_mode="ddp", **train
        )
        jobs[name] = runs.job_of(run, folder / "packed")
    [facts, _] = on_ranks(2, each, runs.train_here, jobs)
    return {name: (folder / name, facts[name]) for name in WISHES}


@cache
def events(path):
    with gzip.open(path) as stream:
        return json.load(stream)["traceEvents"]


def named(path):
    return {event["name"] for event in events(path) if "name" in event}


@one_day_in(2, of=0)
def test_a_trace_holds_the_steps_of_its_window_and_no_others(profiled):
    windows = {
        "one step, everything": ["steps_2-2.rank_0"],
        "two steps, all ranks": ["steps_2-3.rank_0", "steps_2-3.rank_1"],
        "from the start, past the end": ["steps_1-4.rank_0"],
    }
    for name, files in windows.items():
        folder, _ = profiled[name]
        assert sorted(path.name for path in folder.iterdir()) == [
            f"aaaaaaaa.{file}.pt.trace.json.gz" for file in files
        ]
        first, last = (int(step) for step in files[0].split(".")[0][6:].split("-"))
        for path in folder.iterdir():
            steps = {f"step {step}" for step in range(1, 9)} & named(path)
            assert steps == {f"step {step}" for step in range(first, last + 1)}
            assert any(name.startswith("aten::mm") for name in named(path))


def test_a_trace_holds_what_was_asked_to_be_recorded(profiled):
    [full], [bare] = (
        list(profiled[name][0].iterdir()) for name in ("one step, everything", "one step, bare")
    )
    marks = {
        "shapes": lambda event: "Input Dims" in event.get("args", {}),
        "memory": lambda event: event.get("name") == "[memory]",
        "stacks": lambda event: event.get("cat") == "python_function",
    }
    for what, mark in marks.items():
        assert any(map(mark, events(full))), what
        assert not any(map(mark, events(bare))), what


def test_a_profile_that_cannot_be_written_ends_no_run(profiled, folder):
    _, facts = profiled["nowhere"]
    assert facts["steps"] == 4
    assert (
        "no profile of steps 2 to 2 was written"
        in (folder / "out nowhere" / "logs" / "rank_0.log").read_text()
    )
    assert (folder / "a file").read_text() == "in the way"


def test_nothing_is_recorded_unasked_or_past_the_window(profiled, folder):
    path, facts = profiled["off"]
    assert facts["steps"] == 4
    assert not path.exists()
    run = runs.run_config(
        folder / "out one step, everything",
        folder / "model",
        max_steps=6,
        data_parallel_mode="ddp",
        enable_profiling=True,
        profile_trace_dir=str(folder / "late"),
    )
    [facts] = on_ranks(1, runs.train_here, runs.job_of(run, folder / "packed"))
    assert facts["steps"] == 6
    assert not (folder / "late").exists()
