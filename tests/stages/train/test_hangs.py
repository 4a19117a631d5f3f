"""Ranks that hang or die are told by name, place and stack. The ranks are small processes of Python
that only do what a rank does to be seen."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.config.loading.load import loads
from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.core.process.rank_heartbeat import Heartbeat, read_heartbeats
from penstock.train.launch.hang_watchdog import WATCH_LOG, HangWatchdog, heartbeat_folder
from penstock.train.launch.job import LOGS, METRICS, Job
from penstock.train.launch.rank_failures import RankCrash, build_error, crash_file, write_failure
from tests.config.values import smallest

RANK = """
import sys, time
from pathlib import Path
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.train.launch.rank_stacks import register_stack_dump

logs, pulses, rank, what = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
register_stack_dump(logs, rank)
pulse = Heartbeat(pulses, rank=rank)

def all_reduce():
    with pulse.waiting():
        print("there", flush=True)
        time.sleep(60)

def lost_in_the_data():
    print("there", flush=True)
    time.sleep(60)

pulse.set_phase("reading rows", step=7)
if what == "waits":
    pulse.set_phase("computing")
    all_reduce()
else:
    lost_in_the_data()
"""


def job(folder: Path, **launch: object) -> Job:
    (folder / LOGS).mkdir(parents=True)
    run = loads(smallest(train={"output_dir": str(folder)}, launch=dict(launch)))
    return Job("a" * 64, run, folder, "b" * 64, (), 1, "builtin:tiny-qwen3", None, folder, "test")


@contextmanager
def ranks(job: Job, *what: str, module: str = "penstock.train"):
    """Processes that look like ranks of `job`, each in the middle of something."""
    folders = [str(job.output_dir / LOGS), str(heartbeat_folder(job))]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, module, *folders, str(rank), each],
            stdout=subprocess.PIPE,
        )
        for rank, each in enumerate(what)
    ]
    try:
        for process in started:
            assert process.stdout
            assert process.stdout.readline() == b"there\n"
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


def told_by(watch: HangWatchdog) -> str:
    """What the watch says, once nothing has moved for long enough."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if said := watch():
            return said
        time.sleep(0.1)
    raise AssertionError("it saw nothing")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["penstock.train", "penstock.reference"])
def test_a_rank_that_hangs_is_told_with_its_host_and_stack_and_all_are_killed(module, tmp_path):
    watched = job(tmp_path, timeout=0.5)
    watch = HangWatchdog(watched, module)
    with ranks(watched, "waits", "hangs", "waits", module=module) as started:
        said = told_by(watch)
        assert [process.wait(10) for process in started] == [-signal.SIGKILL] * 3
        assert f"rank 1 on {platform.node()} (process {started[1].pid}): 7 step(s) done" in said
        assert "no rank has made progress for 0.5 s (launch.timeout)" in said
        assert "reading rows" in said
        assert "lost_in_the_data" in said
        assert "all_reduce" not in said
        assert "rank(s) 0, 2 are waiting" in said
        assert "all_reduce" in (tmp_path / LOGS / "rank_0.stack").read_text()
        assert watch() is None
    logged = (tmp_path / LOGS / WATCH_LOG).read_text()
    assert re.fullmatch(r"[\d-]+ [\d:]+,000 WARNING " + re.escape(f"{watch.report}\n"), logged)
    error = build_error(tmp_path / LOGS, 1, watch.report)
    assert "lost_in_the_data" in str(error)


def test_a_rank_that_waited_in_vain_leads_to_the_stacks_of_the_others(tmp_path):
    watched = job(tmp_path)
    watch = HangWatchdog(watched)
    with ranks(watched, "waits", "hangs") as started:
        assert watch() is None
        timed_out = RuntimeError("[gloo] Timed out waiting 1810000ms for recv operation")
        write_failure(tmp_path / LOGS, 0, timed_out)
        started[0].kill()
        started[0].wait()
        said = told_by(watch)
        assert "rank 1 on" in said
        assert "lost_in_the_data" in said
        assert started[1].poll() is None, "killed, though launch.timeout is not written"
        assert watch() is None
    assert "lost_in_the_data" in str(build_error(tmp_path / LOGS, 1, watch.report))


@pytest.mark.slow
def test_what_is_stopped_by_the_kernel_is_told_and_what_moves_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.train.launch.rank_stacks.DUMP_TIMEOUT_SECONDS", 1.0)
    watched = job(tmp_path, timeout=1.0)
    watch = HangWatchdog(watched)
    with ranks(watched, "hangs") as started:
        started[0].send_signal(signal.SIGSTOP)
        moving = Heartbeat(heartbeat_folder(watched), rank=5)
        for step in range(6):
            moving.set_phase("computing", step=step)
            assert watch() is None
            time.sleep(0.3)
        assert [beat.step for beat in read_heartbeats(heartbeat_folder(watched))] == [7, 5]
        said = told_by(watch)
        assert "rank 0 on" in said
        assert "no stack dump: the process is stopped" in said


def test_without_any_process_a_timeout_ends_the_wait(tmp_path):
    watch = HangWatchdog(job(tmp_path, timeout=0.1))
    (tmp_path / METRICS).write_text("{}\n")
    assert watch() is None
    time.sleep(0.2)
    with pytest.raises(StageError, match=r"no rank has started within 0\.1 s \(launch\.timeout\)"):
        watch()


def death(rank: int, number: int, when: float) -> dict[str, object]:
    return vars(RankCrash(rank, "there", 77, number, when))


def test_the_first_to_fail_is_the_cause(tmp_path):
    lost = ConnectionError("[gloo] Connection closed by peer")

    def told(deaths: list[dict[str, object]], *errors: Exception) -> str:
        logs = tmp_path / str(len(list(tmp_path.iterdir())))
        logs.mkdir()
        crash_file(logs, "first").write_text(json.dumps([]))
        crash_file(logs, "second").write_text(json.dumps(deaths))
        for rank, error in enumerate(errors):
            write_failure(logs, rank, error)
        return str(build_error(logs, 1))

    now = int(time.time())
    killed = death(3, signal.SIGKILL, now)
    asked = death(2, signal.SIGTERM, now - 5)
    late = death(3, signal.SIGKILL, now + 40)
    assert "rank 3 on there (process 77) was killed by SIGKILL" in told([asked, killed], lost)
    # The agent looks for crashes from time to time, and the others lose their connection at once.
    assert "rank 3 on there (process 77) was killed by SIGKILL" in told([late], lost)
    assert "memory ran out" in told([killed])
    assert "SIGSEGV, an error in native code" in told([death(0, signal.SIGSEGV, now)], lost)
    assert "rank 0 on" in told([late], ValueError("the real one"), lost)
    assert "the real one" in told([late], ValueError("the real one"), lost)
    assert told([late], lost, ConfigError("write less")).startswith("write less")
    assert "died without an error message" in told([asked])


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("write less"), 2),
        (CapabilityError("this machine has no such GPU"), 3),
        (StageError("a row is damaged"), 1),
        (ValueError("a fault of the program"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_ends_with_the_exit_code_of_the_error_that_ended_its_rank(tmp_path, error, exit_code):
    write_failure(tmp_path, 1, error)
    write_failure(tmp_path, 0, ConnectionError("[gloo] Connection closed by peer"))
    found = build_error(tmp_path, 1)
    assert found.exit_code == exit_code
    assert str(error) in str(found)
    assert not found.may_pass


def test_a_heartbeat_costs_little_and_never_fails(tmp_path):
    pulse = Heartbeat(tmp_path, rank=2)
    before = os.times()
    for step in range(1000):
        with pulse.waiting():
            pulse.set_phase("computing", step=step)
    after = os.times()
    assert (after.user + after.system) - (before.user + before.system) < 1.0
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.rank, beat.pid, beat.step, beat.waiting) == (2, os.getpid(), 999, False)
    nowhere = Heartbeat(tmp_path / "rank_2.pulse" / "below", rank=0)
    nowhere.set_phase("computing")
