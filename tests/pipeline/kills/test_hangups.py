"""Terminals, readers, launchers and disks of logs that go away while a run of one rank or two goes
on: it saves or goes on, and ends with the bytes of a run that nothing happened to."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from penstock.train.launch.job import LOGS
from tests.flows.runs import is_saved, steps_in
from tests.pipeline.kills.killing import descendants, is_alive
from tests.pipeline.runs import penstock, sealed, write_run
from tests.waiting import soon

pytestmark = [pytest.mark.exhaustive, pytest.mark.dist, pytest.mark.timeout(600)]

GONE_SECONDS = 60
"""How long processes may stay."""


def config_of(folder: Path, ranks: int) -> Path:
    train = {"max_steps": 400, "save_steps": 0, "save_hf_weights": False}
    if ranks > 1:
        train["data_parallel_mode"] = "ddp"
    launch = {"env": {"OMP_NUM_THREADS": "1"}, "nproc_per_node": ranks}
    stages = {"stages": ["prepare", "pack", "train"]}
    return write_run(folder, train=train, launch=launch, pipeline=stages)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def undisturbed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    penstock("run", config_of(folder, request.param))
    return request.param, sealed(folder)


class Run:
    """`penstock run`, in a session of its own."""

    def __init__(self, config: Path, *, output: int) -> None:
        def start() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
            if os.isatty(output):
                os.login_tty(output)

        self.folder = config.parent
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "run", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=not os.isatty(output),
            preexec_fn=start,
        )
        os.close(output)

    def steps(self, count: int) -> None:
        """Wait until it has done so many steps."""
        soon(lambda: len(steps_in(self.folder)) >= count or self.process.poll() is not None, 200)
        assert self.process.poll() is None, "it ended before it was disturbed"

    def is_gone(self, below: list[int]) -> None:
        self.process.wait(GONE_SECONDS)
        soon(lambda: not any(map(is_alive, below)), GONE_SECONDS)


def hung_up(config: Path) -> None:
    run = Run(config, output=os.open(os.devnull, os.O_WRONLY))
    run.steps(10)
    below = descendants(run.process.pid)
    os.killpg(run.process.pid, signal.SIGHUP)
    run.is_gone(below)


def terminal_closed(config: Path) -> None:
    ours, theirs = pty.openpty()
    run = Run(config, output=theirs)
    os.set_blocking(ours, False)

    def told() -> bool:
        with suppress(BlockingIOError):
            while os.read(ours, 65536):
                pass
        return len(steps_in(run.folder)) >= 10 or run.process.poll() is not None

    soon(told, 200)
    assert run.process.poll() is None
    below = descendants(run.process.pid)
    os.close(ours)
    run.is_gone(below)


def killed(config: Path, module: str) -> None:
    run = Run(config, output=os.open(os.devnull, os.O_WRONLY))
    run.steps(10)
    below = descendants(run.process.pid)
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in below}
    os.kill(next(pid for pid in below if module in words[pid]), signal.SIGKILL)
    run.is_gone(below)


def launcher_killed(config: Path) -> None:
    killed(config, "penstock.engine.launch.torchrun_agent")


def command_killed(config: Path) -> None:
    killed(config, "penstock.cli.main")


def reader_gone(config: Path) -> None:
    """As `penstock run | head -1` does it; the table of results at the end has no reader."""
    read, write = os.pipe()
    run = Run(config, output=write)
    with os.fdopen(read) as reader:
        reader.readline()
    assert run.process.wait(300) == 128 + signal.SIGPIPE


def output_full(config: Path) -> None:
    """The table of results at the end cannot be written."""
    run = Run(config, output=os.open("/dev/full", os.O_WRONLY))
    assert run.process.wait(300) == 1


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with suppress(OSError), (folder / "filled").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def logs_full(config: Path) -> None:
    """The folder of logs is on a full disk."""
    disk = config.parent / "disk"
    with full_disk(disk):
        (config.parent / "out").mkdir()
        (config.parent / "out" / LOGS).symlink_to(disk)
        run = Run(config, output=os.open(os.devnull, os.O_WRONLY))
        assert run.process.wait(300) == 0


SAVES = [hung_up, terminal_closed, launcher_killed, command_killed]
GOES_ON = [reader_gone, output_full, logs_full]


@pytest.mark.parametrize("way", SAVES)
def test_a_run_whose_terminal_or_launcher_goes_saves_and_resumes_to_the_same_bytes(
    way, undisturbed, tmp_path
):
    ranks, whole = undisturbed
    config = config_of(tmp_path, ranks)
    way(config)
    assert not (tmp_path / "out/manifest.json").exists()
    assert is_saved(tmp_path)
    penstock("run", config)
    assert sealed(tmp_path) == whole


@pytest.mark.parametrize("way", GOES_ON)
def test_a_run_whose_output_is_lost_goes_on_to_the_same_bytes(way, undisturbed, tmp_path):
    ranks, whole = undisturbed
    way(config_of(tmp_path, ranks))
    assert sealed(tmp_path) == whole
