"""What `launch` does, seen from the processes it starts: they note what they were given and end."""

import json
import os
import signal
import socket
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.config.loading.load import loads
from penstock.config.schema.run import RunConfig
from penstock.core.errors import StageError
from penstock.core.process.timeout import Deadline
from penstock.train.launch.job import LOGS, Job
from penstock.train.launch.torchrun import LaunchResult, start_ranks
from tests.config.values import smallest

NOTE = """
import json, os, sys, time
from pathlib import Path
is_rank, folder = "RANK" in os.environ, Path(__file__).parent
if is_rank or not os.environ["RANKS_TOO"]:
    note = {"words": sys.orig_argv, "environment": dict(os.environ)}
    part = folder / f"part-{os.getpid()}"
    part.write_text(json.dumps(note))
    part.rename(folder / f"note-{os.getpid()}.json")
    if is_rank:
        starts = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        while len(list(folder.glob("note-*"))) < starts * int(os.environ["LOCAL_WORLD_SIZE"]):
            time.sleep(0.01)
    os._exit(int(os.environ["EXIT_WITH"]))
"""
"""Runs at the start of every Python process whose PYTHONPATH leads to it. A rank ends when all have
left their notes, for the first that fails has the others killed."""


def start(
    folder: Path,
    *,
    ranks: bool,
    status: int = 0,
    env: dict[str, str] | None = None,
    train: dict[str, object] | None = None,
    **launch: object,
) -> LaunchResult:
    """Start the ranks of a job; they, or their launcher at once, only leave a note in `folder`."""
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(NOTE)
    own = {"PYTHONPATH": str(folder), "RANKS_TOO": "1" if ranks else "", "EXIT_WITH": str(status)}
    told = job(folder, train, env={**own, **(env or {})}, **launch)
    return start_ranks(told, folder / "job.json")


def job(folder: Path, train: dict[str, object] | None = None, **launch: object) -> Job:
    settings = {"output_dir": str(folder), **(train or {})}
    run: RunConfig = loads(smallest(train=settings, launch=dict(launch)))
    return Job("a" * 64, run, folder, "b" * 64, (), 1, "builtin:tiny-qwen3", None, folder, "test")


def notes(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("note-*.json"))]


def test_torchrun_is_told_what_is_written(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as first:
        endpoint = f"127.0.0.1:{first.getsockname()[1]}"
        start(
            tmp_path,
            ranks=False,
            nproc_per_node=3,
            nnodes=2,
            node_rank=1,
            rdzv_endpoint=endpoint,
            max_restarts=4,
            stop_timeout=7.5,
            env={"MINE": "yes"},
        )
    [note] = notes(tmp_path)
    words = " ".join(note["words"])
    for told in (
        "--nproc-per-node 3",
        "--nnodes 2",
        "--node-rank 1",
        f"--rdzv-endpoint {endpoint}",
        "--rdzv-conf rank=1",
        "--local-addr 127.0.0.1",
        "--max-restarts 4",
        "json 7.5 ",  # of the agent, behind the file for deaths
    ):
        assert told in words
    assert note["environment"]["MINE"] == "yes"
    assert note["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "8"


def test_auto_is_one_process_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start(tmp_path, ranks=False)
    assert "--nproc-per-node 1 " in " ".join(notes(tmp_path)[0]["words"])


def test_ranks_that_must_give_the_same_bits_find_it_in_their_environment(tmp_path, monkeypatch):
    names = ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    given = []
    for asked in (False, True):
        folder = tmp_path / str(asked)
        allowed = {"allow_cuda_launch_blocking": True}
        start(folder, ranks=False, train={"enable_full_determinism": asked, **allowed})
        given.append([notes(folder)[0]["environment"].get(name) for name in names])
    assert given == [[None, None], ["1", ":4096:8"]]


def test_ranks_draw_their_progress_as_wide_as_the_terminal_that_shows_it(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    shown, typed = os.openpty()
    termios.tcsetwinsize(typed, (20, 61))
    file = tmp_path / "stderr"
    with os.fdopen(shown), os.fdopen(typed, "w") as terminal, file.open("w") as log:
        for where, stderr in (("terminal", terminal), ("log", log)):
            monkeypatch.setattr("sys.stderr", stderr)
            start(tmp_path / where, ranks=False)
    [told], [untold] = (notes(tmp_path / where) for where in ("terminal", "log"))
    assert told["environment"]["COLUMNS"] == "61"
    assert "COLUMNS" not in untold["environment"]


def test_ranks_get_the_secrets_that_they_need_and_no_others(tmp_path, monkeypatch):
    always = {
        *("NCCL_DEBUG", "HF_HOME", "SLURM_JOB_ID", "https_proxy", "COVERAGE_PROCESS_CONFIG"),
        *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
    }
    for name in (
        *("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"),
        *("OPENAI_API_KEY", "DATABASE_URL", "SLURM_JWT", "PENSTOCK_SERVER_KEYS", "MY_TOOL"),
        *always,
    ):
        monkeypatch.setenv(name, "x")

    def given(name: str, train: dict[str, object], pass_env: Sequence[str] = ()) -> set[str]:
        start(tmp_path / name, ranks=False, train=train, pass_env=[*pass_env])
        [note] = notes(tmp_path / name)
        assert {"PATH", "HOME", "PYTHONPATH"} <= note["environment"].keys()
        return {name for name, value in note["environment"].items() if value == "x"}

    assert given("plain", {"use_wandb": False}) == always
    assert given("unset", {}) == {*always, "WANDB_API_KEY"}  # its login decides whether it is used
    tracked = given("tracked", {"use_wandb": False, "use_mlflow": True})
    assert tracked == {*always, "MLFLOW_TRACKING_PASSWORD"}
    passed = given("passed", {"use_wandb": False}, pass_env=["MY_TOOL", "OPENAI_API_KEY"])
    assert passed == {*always, "MY_TOOL", "OPENAI_API_KEY"}


def test_idle_openmp_threads_sleep_soon_unless_the_user_says_how_they_wait(tmp_path, monkeypatch):
    def spins(folder: str) -> str | None:
        start(tmp_path / folder, ranks=False)
        [note] = notes(tmp_path / folder)
        return note["environment"].get("GOMP_SPINCOUNT")

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert spins("unset") == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert spins("written") == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert spins("policy") is None


@pytest.mark.slow
def test_every_process_gets_the_environment_and_is_started_again_as_often_as_written(tmp_path):
    ended = start(
        tmp_path, ranks=True, status=9, nproc_per_node=2, max_restarts=1, env={"MINE": "yes"}
    )
    assert ended.exit_status != 0
    given = [note["environment"] for note in notes(tmp_path)]
    started = sorted((one["TORCHELASTIC_RESTART_COUNT"], one["RANK"]) for one in given)
    assert started == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert {one["MINE"] for one in given} == {"yes"}
    assert {one["WORLD_SIZE"] for one in given} == {"2"}


@pytest.mark.exhaustive
def test_two_machines_meet_and_count_their_processes_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = [
        threading.Thread(
            target=start,
            args=(tmp_path / str(rank),),
            kwargs={
                "ranks": True,
                "nproc_per_node": 1,
                "nnodes": 2,
                "node_rank": rank,
                "rdzv_endpoint": f"127.0.0.1:{port}",
            },
        )
        for rank in (0, 1)
    ]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join(120)
    given = [note["environment"] for rank in "01" for note in notes(tmp_path / rank)]
    assert sorted(one["RANK"] for one in given) == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in given} == {"2"}


@pytest.mark.slow
def test_a_run_without_a_step_for_too_long_is_ended(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(15)\n")
    started = time.monotonic()
    with pytest.raises(StageError, match=r"no rank has started within 0\.5 s \(launch\.timeout\)"):
        start_ranks(job(tmp_path, timeout=0.5, env={"PYTHONPATH": str(tmp_path)}), tmp_path / "j")
    assert time.monotonic() - started < 10


DEAF = """
import os, signal, time
from pathlib import Path
if "RANK" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(__file__).parent / f"rank-{os.getpid()}").touch()
    time.sleep(120)
"""


@pytest.mark.exhaustive
def test_ranks_that_do_not_hear_are_killed_in_time(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DEAF)
    deaf = job(tmp_path, stop_timeout=1.5, nproc_per_node=2, env={"PYTHONPATH": str(tmp_path)})
    asked: list[float] = []

    def ask() -> None:
        while len(list(tmp_path.glob("rank-*"))) < 2:
            time.sleep(0.05)
        asked.append(time.monotonic())
        signal.raise_signal(signal.SIGALRM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(StageError, match="asked"), Deadline(100).enforce("asked"):
        start_ranks(deaf, tmp_path / "j")
    assert 1.5 < time.monotonic() - asked[0] < 15
    ranks = [int(path.name.partition("-")[2]) for path in tmp_path.glob("rank-*")]
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
