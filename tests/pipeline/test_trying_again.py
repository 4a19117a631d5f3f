"""Stages that fail in ways that may pass, and stages that take too long, through the command."""

import time
from types import SimpleNamespace

import pytest

from penstock.core.process import retry
from penstock.prepare.stage import Prepare
from tests.cli.command import penstock
from tests.pipeline.runs import write_run


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made, none of which takes any time."""
    made: list[float] = []
    # Only as that module knows it: others of the process wait for processes in small pauses.
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=made.append))
    return made


@pytest.fixture
def faults(monkeypatch):
    """Faults that the next starts of prepare meet, each once its folder is begun."""
    waiting: list[Exception] = []
    run = Prepare.run

    def meets(self, out):
        if waiting:
            raise waiting.pop(0)
        return run(self, out)

    monkeypatch.setattr(Prepare, "run", meets)
    return waiting


def test_a_lost_connection_is_tried_again_as_often_and_as_late_as_written(tmp_path, faults, pauses):
    config = write_run(tmp_path, pipeline={"retries": 3, "retry_delay": 3})
    faults += [ConnectionResetError() for _ in range(5)]
    failed = penstock("prepare", config)
    assert failed.code == 1
    assert (len(faults), pauses) == (1, [3.0, 6.0, 12.0])
    done = penstock("prepare", config, "--pipeline.retry_delay", "0.5", "--json")
    assert [stage["status"] for stage in done.last["stages"]] == ["resumed"]
    assert (faults, pauses) == ([], [3.0, 6.0, 12.0, 0.5])
    assert "retrying in 0.5 s" in done.err


def test_a_fault_of_the_data_is_told_at_once(tmp_path, faults, pauses):
    faults += [ValueError("row 7 has no text"), ValueError("row 7 has no text")]
    failed = penstock("prepare", write_run(tmp_path, pipeline={"retries": 5}))
    assert (failed.code, len(faults), pauses) == (1, 1, [])


def test_a_stage_that_takes_too_long_is_ended_and_resumed_by_the_next_start(tmp_path, monkeypatch):
    config = write_run(tmp_path, pipeline={"timeouts": {"prepare": 0.2, "pack": 900}})
    with monkeypatch.context() as slowly:
        slowly.setattr(Prepare, "run", lambda *_: time.sleep(60))
        ended = penstock("prepare", config)
    assert ended.code == 1
    assert "prepare was ended after 0.2 s (pipeline.timeouts.prepare)" in ended.err
    again = penstock("prepare", config, "--pipeline.timeouts.prepare", "600", "--json")
    assert [stage["status"] for stage in again.last["stages"]] == ["resumed"]


def test_a_deadline_of_something_that_is_no_stage_is_refused(tmp_path):
    config = write_run(tmp_path, pipeline={"timeouts": {"evaluate": 60}})
    refused = penstock("check", config)
    assert refused.code == 2
    assert "pipeline.timeouts" in refused.err
