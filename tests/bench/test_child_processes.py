"""Benches that watch processes and files see what is there."""

import subprocess
import sys

import pytest

from tests.bench.bench_first_step import saved_step, steps_in
from tests.bench.child_processes import run_measured

HOLD = "x = b'1' * (150 << 20); import time; time.sleep(0.5); print('held')"
START = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}], check=True)"


def test_memory_of_a_process_that_a_command_starts_is_counted():
    taken = run_measured([sys.executable, "-c", START])
    assert taken.output == "held\n"
    assert taken.peak_bytes > 150 << 20
    assert taken.seconds >= 0.5


def test_a_command_that_fails_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        run_measured([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_step_counts_once_its_record_is_whole_and_newer(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    file.parent.mkdir()
    assert steps_in(tmp_path) == 0
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert steps_in(tmp_path) == 2
    assert steps_in(tmp_path, since=file.stat().st_mtime) == 0


def test_a_checkpoint_that_is_being_written_does_not_count(tmp_path):
    for name in ("global_step_2", "global_step_4.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "COMPLETE").touch()
    assert saved_step(tmp_path) == 2
