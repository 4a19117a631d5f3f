"""Two machines that train together: the real command on each, with a network of its own each where
this one may make networks."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.core.cache.manifest import MANIFEST
from tests.pipeline.runs import write_run
from tests.turns import one_day_in

PATIENCE = 100.0


@dataclass(frozen=True)
class Machines:
    """How a command is run on either of two machines, and where they meet."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    endpoint: str
    interface: str


@pytest.fixture
def machines():
    """Two network namespaces with a cable between them, else twice this machine."""
    names = [f"penstock-{os.getpid()}-{number}" for number in (0, 1)]
    ends = [f"pk{os.getpid() % 10**7}{number}" for number in "ab"]
    made = shutil.which("ip") and all(_ip("netns", "add", name) for name in names)
    if made and _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1]):
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            inside = ("-n", name)
            assert _ip("link", "set", end, "netns", name)
            assert _ip(*inside, "link", "set", end, "name", "eth0")
            assert _ip(*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            assert _ip(*inside, "link", "set", "eth0", "up")
            assert _ip(*inside, "link", "set", "lo", "up")
        first, second = (("ip", "netns", "exec", name) for name in names)
        yield Machines((first, second), "10.77.0.1:29511", "eth0")
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        yield Machines(((), ()), f"127.0.0.1:{port}", "lo")
    if shutil.which("ip"):
        for name in names:
            _ip("netns", "del", name)


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


def start(machines: Machines, number: int, verb: str, config: Path) -> "subprocess.Popen[str]":
    words = [f"--launch.node_rank={number}", f"--launch.rdzv_endpoint={machines.endpoint}"]
    command = [sys.executable, "-m", "penstock.cli.main", verb, str(config), *words]
    return subprocess.Popen(
        [*machines.prefixes[number], *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes: "subprocess.Popen[str]") -> list[str]:
    """What each said, once all are done."""
    said: list[str] = []
    for process in processes:
        try:
            said.append(process.communicate(timeout=PATIENCE)[0])
        except subprocess.TimeoutExpired:
            for each in processes:
                each.terminate()
            said.append(process.communicate()[0])
            raise AssertionError("\n".join(said)) from None
    return said


def wait_for(condition: Callable[[], bool], *processes: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        dead = [process for process in processes if process.poll() is not None]
        if dead or time.monotonic() > deadline:
            for each in processes:
                each.terminate()
            raise AssertionError("\n".join(each.communicate()[0] for each in processes))
        time.sleep(0.1)


def steps(folder: Path) -> list[int]:
    metrics = folder / "out" / "metrics.jsonl"
    if not metrics.is_file():
        return []
    records = [json.loads(line) for line in metrics.read_text().splitlines() if line]
    return [record["step"] for record in records if "loss" in record]


@one_day_in(3, of=0)
@pytest.mark.dist
def test_two_machines_stop_together_save_and_go_on_to_the_end(machines, tmp_path):
    train = {"data_parallel_mode": "fsdp2", "global_batch_size": 2, "max_steps": 150}
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": machines.interface}
    launch = {"nnodes": 2, "nproc_per_node": 1, "env": env}
    config = write_run(tmp_path, train={**train, "save_steps": 1000}, launch=launch)
    # The second is there first: it finds nobody yet, and waits.
    second = start(machines, 1, "run", config)
    first = start(machines, 0, "run", config)
    wait_for(lambda: len(steps(tmp_path)) >= 3, first, second)
    # Told to both the process and all it started, as schedulers do; the other hears it from it.
    second.send_signal(signal.SIGTERM)
    said = ended(first, second)
    assert [first.returncode, second.returncode] == [143, 143], said
    done = steps(tmp_path)[-1]
    assert 3 <= done < 150
    assert (tmp_path / "out" / "checkpoints" / f"global_step_{done}" / "COMPLETE").is_file()
    assert f"saved step {done}" in said[0]

    first, second = (start(machines, number, "run", config) for number in (0, 1))
    said = ended(first, second)
    assert [first.returncode, second.returncode] == [0, 0], said
    assert steps(tmp_path) == list(range(1, 151))
    assert (tmp_path / "out" / MANIFEST).is_file()
    lines = said[0].splitlines()
    assert any(line.startswith("next ") for line in lines), (
        "the first machine has exported the model"
    )
    assert "train" in said[1].splitlines()[-1], "the second machine has only lent its processes"
