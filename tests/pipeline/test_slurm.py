"""A Slurm of two nodes on this machine, where Slurm is installed and may be started: the printed
script, and `srun` in torchrun's place."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.core.cache.manifest import MANIFEST
from tests.pipeline.runs import penstock, write_run
from tests.pipeline.test_machines import steps

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
PATIENCE = 150.0

CONF = """
ClusterName=penstock
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool_%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={host}-too NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def until(
    condition: Callable[[], bool], said: Callable[[], str], patience: float = PATIENCE
) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def cluster(monkeypatch):
    """The environment of Slurm's commands is set; its daemons end with the test."""
    if MISSING or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm; not found: {', '.join(MISSING) or 'root'}")
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="pk") as folder, ExitStack() as held:
        home = Path(folder)
        (home / "state").mkdir()
        host = socket.gethostname()
        conf = home / "slurm.conf"
        conf.write_text(CONF.format(home=home, host=host, ports=free_ports(3)))
        key = home / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        monkeypatch.setenv("SLURM_CONF", str(conf))
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        munge = [f"--{each}-file={home}/munge.{each}" for each in ("key", "log", "pid", "seed")]
        daemons = [
            ["munged", "--force", "--foreground", f"--socket={home}/munge.socket", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", host],
            ["slurmd", "-D", "-N", f"{host}-too"],
        ]
        with (home / "daemons.log").open("wb") as log:
            for words in daemons:
                process = subprocess.Popen(words, stdout=log, stderr=log, cwd=home)
                held.callback(process.wait)
                held.callback(process.kill if words[0] == "munged" else process.terminate)
                time.sleep(0.5)
            idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
            until(lambda: told(*idle) == "2", lambda: (home / "daemons.log").read_text(), 30.0)
            yield


def told(*words: str, given: str = "") -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, input=given)
    return done.stdout.strip() + done.stderr.strip()


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.usefixtures("cluster")
def test_a_slurm_job_of_two_nodes_saves_when_told_to_end_and_srun_alone_goes_on(tmp_path):
    train = {"data_parallel_mode": "fsdp2", "global_batch_size": 2, "max_steps": 150}
    launch = {
        "nnodes": 2,
        "nproc_per_node": 1,
        "rdzv_endpoint": f"first:{free_ports(1)[0]}",
        "env": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    config = write_run(tmp_path, train={**train, "save_steps": 1000}, launch=launch)
    script = penstock("launch", config, "--print", "slurm", "--gpus=0", "--cpus=1").stdout
    job = told("sbatch", "--parsable", f"--chdir={tmp_path}", "--output=job.log", given=script)
    log = tmp_path / "job.log"

    def said() -> str:
        return log.read_text() if log.is_file() else f"job {job} has not begun"

    until(lambda: len(steps(tmp_path)) >= 3, said)
    told("scancel", "--signal=TERM", job)
    until(lambda: not told("squeue", "-h", "-j", job, "-o", "%i"), said)
    done = steps(tmp_path)[-1]
    assert done < 150, log.read_text()
    assert (tmp_path / "out" / "checkpoints" / f"global_step_{done}" / "COMPLETE").is_file()
    assert "terminated; run the same command again to resume" in log.read_text()
    assert not (tmp_path / "out" / MANIFEST).exists()

    rank = [sys.executable, "-m", "penstock.cli.train", str(config)]
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", *rank]
    ended = subprocess.run(srun, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert steps(tmp_path) == list(range(1, 151))
    assert (tmp_path / "out" / MANIFEST).is_file()
