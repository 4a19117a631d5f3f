"""What takes the place of what only Linux has does the same."""

import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.core.machine import linux
from tests.cli.command import penstock
from tests.conftest import ROOT
from tests.pipeline.runs import write_run
from tests.turns import one_day_in
from tests.waiting import soon


@pytest.fixture(params=["Linux", "elsewhere"])
def system(request, monkeypatch, tmp_path):
    if request.param == "elsewhere":
        monkeypatch.setattr(linux, "PROC", tmp_path)
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    return request.param


@pytest.mark.usefixtures("system")
def test_processes_are_found_by_their_parent_and_have_their_command():
    code = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, "a-word"]) as child:
        try:
            soon(lambda: child.pid in linux.child_processes(os.getpid()), 20)
            soon(lambda: "a-word" in linux.command_line(child.pid), 20)
            child.kill()
            soon(lambda: child.pid not in linux.child_processes(os.getpid()), 20)
        finally:
            child.kill()
    assert "a-word" not in linux.command_line(child.pid)


def test_the_machine_is_measured(system, tmp_path):
    assert 1 <= linux.num_cpus() <= (os.cpu_count() or 1)
    assert linux.cpu_model()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert linux.memory_bytes() == pytest.approx(memory, rel=0.05)
    assert 10 << 20 < linux.peak_memory_bytes() < memory
    if system == "Linux":
        assert linux.process_start() == pytest.approx(time.time(), abs=3600)
    with (tmp_path / "file").open("wb") as stream:
        linux.allocate(stream.fileno(), 12345)
    assert (tmp_path / "file").stat().st_size == 12345


ORPHAN = """
import os, sys, time
from penstock.core.machine import linux
from penstock.core.process import die_with_parent
if sys.argv[1] == "elsewhere":
    die_with_parent.signal_on_parent_death = lambda number: False
die_with_parent.end_with_parent(os.getppid())
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(60)
"""

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def is_running(pid: int) -> bool:
    return "die_with_parent" in " ".join(linux.command_line(pid))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["Linux", "elsewhere"])
def test_a_process_ends_with_its_parent(where, tmp_path):
    file = tmp_path / "pid"
    words = [sys.executable, "-c", PARENT, ORPHAN, where, str(file)]
    with subprocess.Popen(words) as parent:
        pid = int(soon(lambda: file.exists() and file.read_text(), 60) or "0")
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    soon(lambda: not is_running(pid), 20)


@one_day_in(3, of=1)
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("warm_ranks")
def test_a_run_ends_with_the_same_bytes_where_nothing_is_there_that_only_linux_has(tmp_path):
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding/sitecustomize.py").write_text(
        "from tests.core.without_linux import hide\nhide()\n"
    )
    hidden = os.pathsep.join((str(tmp_path / "hiding"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": hidden, "OMP_NUM_THREADS": "1"}
    for statement in ("import triton", "open('/proc/self/stat')", "import os; os.fork()"):
        words = [sys.executable, "-c", statement]
        assert subprocess.run(words, env=environment, capture_output=True).returncode == 1
    here, there = (write_run(tmp_path / name) for name in ("linux", "elsewhere"))
    command = [sys.executable, "-m", "penstock.cli.main", "run", str(there)]
    done = subprocess.run(
        command, cwd=there.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert penstock("run", here).code == 0
    models = [config.parent / "out/hf/model.safetensors" for config in (here, there)]
    assert models[0].read_bytes() == models[1].read_bytes()
