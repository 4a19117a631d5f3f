"""A worker that is told to end stays until what it started has ended in its own way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.core.machine.linux import child_processes
from tests.conftest import ROOT
from tests.waiting import soon

WORKER = ROOT / "deploy" / "worker.py"

RUN = """
import signal, sys, time, pathlib
here = pathlib.Path(sys.argv[1])
def save(*_):
    time.sleep(0.2)
    (here / "saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
(here / "began").touch()
time.sleep(60)
"""

# As Prefect's: its run is in a session of its own, and is killed when the worker is told to end.
WORKER_OF_ONE_RUN = """
import signal, subprocess, sys
def leave(*_):
    run.kill()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
run = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], start_new_session=True)
sys.exit(run.wait() and 7)
"""


def started(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WORKER_OF_ONE_RUN, str(folder), RUN]
    worker = subprocess.Popen([sys.executable, str(WORKER), *command])
    soon((folder / "began").exists, 30, every=0.05)
    return worker


def test_runs_save_before_their_worker_is_gone(tmp_path):
    worker = started(tmp_path)
    worker.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    worker.send_signal(signal.SIGINT)  # whoever is impatient gains and breaks nothing
    assert worker.wait(30) == 0
    assert (tmp_path / "saved").exists()


def test_a_worker_that_fails_is_told_of_by_its_exit_code_once_its_runs_are_gone(tmp_path):
    worker = started(tmp_path)
    [prefects] = child_processes(worker.pid)
    os.kill(prefects, signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.2)  # its run goes on
    [run] = child_processes(worker.pid)
    os.kill(run, signal.SIGTERM)
    assert worker.wait(30) == -signal.SIGKILL & 0xFF
    assert (tmp_path / "saved").exists()
