"""What is tried again, and what is told at once."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from penstock.core.errors import ConfigError, Interrupted, StageError
from penstock.core.process import retry
from penstock.core.process.retry import is_transient
from penstock.core.process.timeout import Deadline
from penstock.train.launch.rank_failures import RankCrash, build_error, crash_file, write_failure


def answered(status):
    request = httpx2.Request("GET", "https://hub.example/x")
    return HfHubHTTPError("no", response=httpx2.Response(status, request=request))


def wrapped(error):
    """The error as a stage hands it on."""
    failure = StageError("prepare failed")
    failure.__cause__ = error
    return failure


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx2.ConnectError("unreachable"), True),
        (answered(503), True),
        (answered(429), True),
        (answered(404), False),
        (answered(401), False),
        (ConnectionResetError(), True),
        (OfflineModeIsEnabled(), False),
        (ValueError("row 7 has no column text"), False),
        (FileNotFoundError("chats.jsonl"), False),
        (OSError(28, "No space left on device"), False),
        (ConfigError("train.lr"), False),
        (Interrupted("asked to stop"), False),
        (StageError("rows 3 to 9 are empty"), False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_only_faults_of_connections_may_pass(error, expected):
    assert is_transient(wrapped(error)) == expected
    assert is_transient(wrapped(wrapped(error))) == expected


@pytest.mark.parametrize(("number", "expected"), [(9, True), (11, False)])
def test_a_run_whose_rank_was_killed_may_go_on_and_one_that_crashed_may_not(
    number, expected, tmp_path
):
    deaths = [vars(RankCrash(1, "here", 7, number, 1.0))]
    crash_file(tmp_path, "test").write_text(json.dumps(deaths))
    assert build_error(tmp_path, 1).may_pass == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[pair.cc:538] Connection closed by peer [10.0.0.2]:80"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ConfigError("the rows hold token id 70"), False),
    ],
)
def test_ranks_that_lost_each_other_may_go_on_and_faults_of_a_rank_may_not(
    error, expected, tmp_path
):
    write_failure(tmp_path, 0, error)
    assert build_error(tmp_path, 1).may_pass == expected


def test_each_pause_doubles_the_last_and_what_cannot_pass_is_not_tried_again(monkeypatch):
    slept, said = [], []
    monkeypatch.setattr(retry.time, "sleep", slept.append)
    faults = [wrapped(ConnectionResetError()) for _ in range(2)]

    def act():
        if faults:
            raise faults.pop()
        return "done"

    assert retry.retry_with_backoff(act, retry.backoff_seconds(2, 1.5), said.append) == "done"
    assert slept == [1.5, 3.0]
    assert [line.splitlines()[-1].strip() for line in said] == [
        "The error may be temporary: retrying in 1.5 s.",
        "The error may be temporary: retrying in 3 s.",
    ]
    faults += [StageError("no such column"), StageError("never asked for")]
    with pytest.raises(StageError, match="never asked for"):
        retry.retry_with_backoff(act, retry.backoff_seconds(2, 1.5), said.append)
    assert len(faults) == 1
    faults[:] = [wrapped(ConnectionResetError()) for _ in range(3)]
    with pytest.raises(StageError, match="prepare failed"):
        retry.retry_with_backoff(act, retry.backoff_seconds(2, 0), said.append)


def test_a_deadline_counts_from_its_beginning_and_leaves_other_alarms_as_they_were():
    before, reached = signal.getsignal(signal.SIGALRM), []

    def work():
        deadline = Deadline(0.05)
        with deadline.enforce("too long"):
            time.sleep(0.1)
            reached.append("the beginning")
            deadline.start()
            time.sleep(30)

    with pytest.raises(StageError, match="too long"):
        work()
    assert reached == ["the beginning"]
    assert signal.getsignal(signal.SIGALRM) is before


ORPHAN = """
import os, signal, subprocess, sys, time
from penstock.core.process.die_with_parent import end_with_parent, outlive_parent_by
if sys.argv[1:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    outlive_parent_by(0.2)
    print(os.getpid(), flush=True)
    time.sleep(60)
child = subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
child.wait()
"""


@pytest.mark.slow
def test_a_process_that_does_not_hear_is_gone_soon_after_its_parent(tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        assert os.path.exists(f"/proc/{child}")  # noqa: PTH110
        deadline = time.monotonic() + 20
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(child, 0)
                time.sleep(0.05)
            os.kill(child, signal.SIGKILL)
            raise AssertionError("it is still there")
