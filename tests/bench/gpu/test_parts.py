"""The first hour on a GPU begins without a typo, and goes on where it was cut off."""

import argparse
import json
import subprocess
import sys
from importlib import import_module

import pytest

from tests.bench.gpu import __main__ as runner
from tests.bench.gpu.parts import PART_SECONDS, PARTS, Part, Step
from tests.bench.gpu.results import Origin, Results, StepResult
from tests.conftest import ROOT

STEPS = {step.name: step for part in PARTS for step in part.steps}
MACHINE = {"device": "a machine", "GPUs": "1"}
EARLIER = Origin("2026-01-02", "abc", "580", "3.11", "2.11")
NOW = Origin("2026-03-04", "def", "590", "3.12", "2.13")


class ParsedError(Exception):
    """In place of what would follow the command line."""


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dry", [False, True], ids=["GPU", "dry"])
def test_a_step_takes_its_command_line(name, dry, monkeypatch):
    [_, _, module, *arguments] = STEPS[name].arguments(dry=dry)
    if module == "pytest":
        paths = [one.removeprefix("--ignore=") for one in arguments]
        assert all((ROOT / one).exists() for one in paths if one.startswith("tests"))
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser):
        parse(parser)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(ParsedError):
        import_module(module).main()


def test_no_part_takes_more_than_three_minutes_and_no_two_steps_have_one_name():
    for part in PARTS:
        assert sum(step.seconds for step in part.steps) <= PART_SECONDS, part.letter
    assert len(STEPS) == sum(len(part.steps) for part in PARTS)


GOOD = """
from tests.bench.figures import record
record("speed", 2.0, goal=1.0)
record("memory", 2.0, "GiB", goal=1.0, at_most=True)
"""
SLOW = "import time; print('begun', flush=True); time.sleep(60)"


def a_step(name, code, seconds=60):
    return Step(name, ("-c", code), seconds)


@pytest.mark.slow
def test_every_step_ends_with_a_verdict_and_the_page_has_its_figures(tmp_path):
    steps = (
        a_step("good", GOOD),
        a_step("bad", "raise SystemExit('broken')"),
        a_step("late", SLOW, 2),
    )
    results = Results(tmp_path / "gpu.json", MACHINE)
    until = runner.time.monotonic() + 600
    runner.run_part(Part("a", "Some", steps), results, until, dry=False, again=False)
    again = Results.open(tmp_path / "gpu.json", MACHINE)
    verdicts = {name: step.verdict for name, step in again.steps.items()}
    assert verdicts == {
        "good": "ran; 1 of 2 goals; MISSED: memory",
        "bad": "FAILED with status 1: broken",
        "late": "ran out of time",
    }
    assert again.steps["late"].output == ["begun"]
    assert [one["value"] for one in again.steps["good"].figures] == [2.0, 2.0]


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_and_what_is_done_stays_done(tmp_path):
    results = Results(tmp_path / "gpu.json", MACHINE)
    steps = (a_step("good", GOOD), a_step("slow", SLOW, 4))
    part = Part("a", "Some", steps)
    runner.run_part(part, results, runner.time.monotonic() + 40, dry=False, again=False)
    first = json.loads((tmp_path / "gpu.json").read_text())["steps"]["good"]
    results.steps["slow"].verdict = "cut off"
    quick = Part("a", "Some", (steps[0], a_step("slow", "print('done')")))
    runner.run_part(quick, results, runner.time.monotonic() + 600, dry=False, again=False)
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert steps["good"] == first
    assert steps["slow"]["verdict"] == "ran: done"


def row(name, value, unit=""):
    return {"name": name, "value": value, "unit": unit, "goal": None, "reached": None}


def result(verdict, *figures, origin=NOW, seconds=60):
    return StepResult(verdict, seconds, "command", origin, list(figures))


@pytest.mark.parametrize(
    ("verdict", "kept"),
    [
        ("ran out of time", [1, 9]),
        ("FAILED with status 1: broken", [1, 9]),
        ("cut off", [1, 9]),
        ("ran; 2 of 2 goals", [1]),
    ],
)
def test_a_step_that_dies_keeps_its_rows_and_earlier_ones_that_it_did_not_come_to(
    verdict, kept, tmp_path
):
    results = Results(tmp_path / "gpu.json", MACHINE)
    results.add("step", result("ran", row("a", 7), row("b", 9), origin=EARLIER))
    results.add("step", result(verdict, row("a", 1)))
    step = Results.open(tmp_path / "gpu.json", MACHINE).steps["step"]
    assert [figure["value"] for figure in step.figures] == kept
    assert step.origin == NOW
    assert all(Origin(**figure["origin"]) == EARLIER for figure in step.figures[1:])


def test_the_page_says_of_each_figure_when_and_with_what_it_was_measured(tmp_path):
    results = Results(tmp_path / "gpu.json", MACHINE)
    results.add("optimizers", result("ran", row("a", 7), row("b", 9), origin=EARLIER))
    results.add("optimizers", result("ran out of time", row("a", 1)))
    results.write_page(tmp_path, "gpu")
    page = (tmp_path / "gpu.md").read_text()
    assert "- optimizers: ran out of time (60 s; 2026-03-04, def, driver 590" in page
    assert "| a | 1  |" in page
    assert "| b (2026-01-02, abc, driver 580, PyTorch 2.11) | 9  |" in page


def test_a_step_runs_again_where_it_was_cut_off_or_may_take_longer_now():
    assert result("ran").is_done(60)
    assert result("FAILED with status 1: broken").is_done(60)
    assert not result("cut off").is_done(60)
    assert result("ran out of time", seconds=60).is_done(60)
    assert not result("ran out of time", seconds=60).is_done(90)


def test_results_of_another_machine_are_not_mixed_in(tmp_path):
    results = Results(tmp_path / "gpu.json", MACHINE)
    runner.run_part(
        Part("a", "Some", (a_step("one", "print(1)"),)), results, 1e9, dry=False, again=False
    )
    with pytest.raises(SystemExit, match="Name another folder"):
        Results.open(tmp_path / "gpu.json", {**MACHINE, "device": "another"})


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_part_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "tests.bench.gpu", "h", "--dry", "--out", str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout
    page = (tmp_path / "gpu.md").read_text()
    assert "| copying |" in page
    assert "- nccl: ran" in page


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_all_parts_run_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "tests.bench.gpu", "--dry", "--out", str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-4000:]
    assert "not measured" not in (tmp_path / "gpu.md").read_text()
