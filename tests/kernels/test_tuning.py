"""What is measured once is measured by nobody again, and by no two at the same time."""

import json
import math
import time
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from penstock.core import env
from penstock_kernels import op
from penstock_kernels.tuning import select_config
from penstock_kernels.tuning.autotune_cache import AutotuneCache, AutotuneKey, Device
from penstock_kernels.tuning.tuner import Autotuner, size_class
from tests.ranks import on_ranks

H200, OTHER = Device("NVIDIA H200", (9, 0)), Device("NVIDIA H100 80GB HBM3", (9, 0))
QUESTION = AutotuneKey("group_gemm.by_rows", "triton 3.9.0, abc", "bfloat16 64x8")


class Tile(NamedTuple):
    rows: int
    warps: int


RULE, FAST, SLOW = Tile(128, 8), Tile(64, 4), Tile(32, 4)
TIMES = {RULE: 10.0, FAST: 5.0, SLOW: 20.0}


class Bench:
    """Launches of tiles that take as long as a table says, and how often each was measured."""

    def __init__(self, times=TIMES):
        self.times, self.now, self.measured = times, [], []

    def launch(self, tile):
        self.now.append(tile)

    def measure(self, works):
        self.now = []
        for work in works:
            work()
        self.measured += self.now
        return [self.times[tile] for tile in self.now]


def process(folder, bench, device=H200):
    """What a process of its own begins with."""
    return Autotuner(AutotuneCache(folder, device), bench.measure)


def ask(tuner, bench, question=QUESTION, several=(RULE, FAST, SLOW), **how):
    return tuner.choose(question, several, bench.launch, **how)


def test_the_first_call_measures_and_neither_the_next_nor_another_process_does(tmp_path):
    first, second = Bench(), Bench()
    tuner = process(tmp_path, first)
    assert [ask(tuner, first) for _ in range(2)] == [FAST, FAST]
    assert first.measured == [RULE, FAST, SLOW]
    assert ask(process(tmp_path, second), second) == FAST
    assert second.measured == []


@pytest.mark.parametrize(
    "change",
    [
        {"device": OTHER},
        {"question": QUESTION._replace(made_by="triton 3.10.0, abc")},
        {"question": QUESTION._replace(inputs="bfloat16 128x8")},
        {"several": (SLOW, FAST, RULE)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_device_kernel_class_or_rule_is_measured_by_itself(change, tmp_path):
    bench = Bench()
    ask(process(tmp_path, bench), bench)
    again = Bench()
    asked = {name: value for name, value in change.items() if name != "device"}
    tuner = process(tmp_path, again, change.get("device", H200))
    assert ask(tuner, again, **asked) == FAST
    assert sorted(again.measured) == sorted(TIMES)


def test_sizes_are_asked_for_by_their_class():
    assert size_class((1000, 8, 1)) == size_class((1024, 5, 1)) != size_class((1025, 8, 1))


def test_what_a_changed_kernel_was_measured_with_is_dropped_and_others_stay(tmp_path):
    bench, other = Bench(), QUESTION._replace(kernel="quant.multiply")
    tuner = process(tmp_path, bench)
    ask(tuner, bench)
    ask(tuner, bench, other)
    changed = QUESTION._replace(made_by="triton 3.9.0, def")
    ask(process(tmp_path, bench), bench, changed)
    book = AutotuneCache(tmp_path, H200)
    asked = "bfloat16 64x8 128/8"
    assert book.find(QUESTION._replace(inputs=asked)) is None
    assert book.find(other._replace(inputs=asked)) == [*FAST]
    assert book.find(changed._replace(inputs=asked)) == [*FAST]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({RULE: 10.0, FAST: 9.9, SLOW: 20.0}, RULE),
        ({RULE: math.inf, FAST: 9.9, SLOW: 20.0}, FAST),
        ({RULE: math.inf, FAST: math.inf, SLOW: math.inf}, RULE),
    ],
    ids=["hardly faster", "does not fit", "none fits"],
)
def test_the_rule_is_left_for_what_is_clearly_faster_alone(times, expected, tmp_path):
    bench = Bench(times)
    assert ask(process(tmp_path, bench), bench) == expected
    [path] = tmp_path.glob("*.json")
    assert "Infinity" not in path.read_text()


def test_where_nothing_may_be_measured_the_rule_holds_and_is_not_noted(tmp_path):
    bench = Bench()
    tuner = process(tmp_path, bench)
    assert ask(tuner, bench, may_measure=False) == RULE
    assert bench.measured == []
    assert ask(tuner, bench) == FAST
    assert ask(process(tmp_path, bench), bench, may_measure=False) == FAST


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": 0}', '{"format": 1, "kernels": {"group_gemm.by_rows": 7}}'],
)
def test_a_file_that_cannot_be_read_is_told_of_once_and_written_anew(text, tmp_path):
    bench, book = Bench(), AutotuneCache(tmp_path, H200)
    book.path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"the tuning file .*nvidia-h200-9\.0\.json") as told:
        assert (
            Autotuner(book, bench.measure).choose(QUESTION, (RULE, FAST, SLOW), bench.launch)
            == FAST
        )
    assert len(told) == 1
    again = Bench()
    assert ask(process(tmp_path, again), again) == FAST
    assert again.measured == []


def test_a_choice_that_is_no_candidate_any_more_is_measured_again(tmp_path):
    bench = Bench()
    ask(process(tmp_path, bench), bench)
    again = Bench()
    assert ask(process(tmp_path, again), again, several=(RULE, SLOW)) == RULE
    assert again.measured == [RULE, SLOW]


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_result(tmp_path):
    bench = Bench()
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="every process measures for itself"):
        assert ask(process(tmp_path / "file", bench), bench) == FAST


def test_while_another_process_measures_the_rule_is_taken_at_once_and_not_remembered(tmp_path):
    """The other one may wait for a collective that this process is to issue."""
    bench = Bench()
    tuner = process(tmp_path, bench)
    with AutotuneCache(tmp_path, H200).lock():
        started = time.monotonic()
        assert ask(tuner, bench) == RULE
        assert time.monotonic() - started < 5
    assert bench.measured == []
    assert ask(tuner, bench) == FAST


@pytest.mark.parametrize(
    "variables", [{"PENSTOCK_CACHE_HOME": "/a"}, {"XDG_CACHE_HOME": "/b"}, {}], ids=str
)
def test_files_lie_where_other_caches_of_the_user_do(variables, monkeypatch):
    for name in ("PENSTOCK_CACHE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert op.cache_home() == env.cache_home()


def test_no_kernel_is_measured_in_the_interpreter_or_on_a_cpu():
    def launch(_):
        raise AssertionError("nothing is launched")

    with warnings.catch_warnings(action="error"):
        found = select_config(torch.mm, torch.empty(8), (8,), (RULE, FAST), launch)
    assert found == RULE


def two_at_once(folder):
    """What a rank chooses for forty questions in the end, and how many tiles it measured."""
    rank = dist.get_rank()
    # Each finds another tile fastest, so that only what is shared makes them agree.
    bench = Bench({RULE: 10.0, (FAST, SLOW)[rank]: 5.0, (SLOW, FAST)[rank]: 20.0})
    tuner = process(folder, bench)
    dist.barrier()
    questions = [QUESTION._replace(inputs=str(number)) for number in range(40)]
    for question in questions:
        assert ask(tuner, bench, question) in (RULE, FAST, SLOW)
    # What both asked for at once is left to measure.
    for turn in range(2):
        dist.barrier()
        if turn == rank:
            for question in questions:
                ask(tuner, bench, question)
    return [ask(tuner, bench, question) for question in questions], len(bench.measured)


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_at_once_choose_alike_and_share_the_measuring(tmp_path):
    (one, other), measured = zip(*on_ranks(2, two_at_once, tmp_path), strict=True)
    assert one == other
    assert sum(measured) == 3 * 40
    [path] = tmp_path.glob("*.json")
    assert len(json.loads(path.read_text())["kernels"][QUESTION.kernel]["choices"]) == 40
    assert not [*tmp_path.glob("*.part")]
