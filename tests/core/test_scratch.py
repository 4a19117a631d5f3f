"""What killed processes leave behind, and who removes it."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.core.cache.in_use import GATE_LOCK, PINS_FOLDER, pin_artifacts
from penstock.core.process.scratch_dir import scratch_folder
from tests.core.toy import Letters, step_of

HOLDS = """
import sys
from penstock.core.process.scratch_dir import scratch_folder
with scratch_folder("test") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_of_a_killed_process_is_removed_by_the_next_and_one_in_use_stays(temporary):
    held: list[tuple[subprocess.Popen[str], Path]] = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        held.append((process, folder))
    (killed, left), (living, kept) = held
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    for folder in (left, kept):
        os.utime(folder, (0, 0))  # long ago
    young = temporary / "penstock-test-young"
    young.mkdir()
    with scratch_folder("test") as mine:
        assert mine.is_dir()
        assert not left.exists()
        assert kept.is_dir()
        assert young.is_dir(), "it may be locked in a moment"
    assert not mine.exists()
    living.communicate("")
    assert not kept.exists()


def test_marks_and_locks_of_dead_processes_are_removed_by_the_next_mark(tmp_path):
    root = tmp_path / "results"
    marks = root / PINS_FOLDER
    marks.mkdir(parents=True)
    for name in ("dead.json", "dead.lock", "half.lock"):
        (marks / name).write_text("[]")
    with pin_artifacts([step_of(Letters(), root)]):
        names = {path.suffix for path in marks.iterdir() if path.name != GATE_LOCK}
        assert names == {".json", ".lock"}
        assert len([*marks.iterdir()]) == 3
    assert [path.name for path in marks.iterdir()] == [GATE_LOCK]
