"""Prefect on PostgreSQL, with the files of deploy/, as docs/guide/operations.md says."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from penstock.core.machine.linux import child_processes
from tests.conftest import ROOT
from tests.flows.runs import PLACES, is_begun, manifests_in, processes_of, tasks_of
from tests.flows.server import PREFECT, Prefect, free_port
from tests.pipeline.runs import penstock, sealed, write_chats, write_run
from tests.waiting import soon

FOUND = [*sorted(Path("/usr/lib/postgresql").glob("*/bin")), *map(Path, os.get_exec_path())]
PROGRAMS = next((path for path in FOUND if (path / "initdb").exists()), None)

AWAY_SECONDS = 4.0
"""How long the database is gone: longer than what comes back to it at once."""

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(PROGRAMS is None, reason="PostgreSQL is not installed"),
]


class Postgres:
    """A database of this test alone, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.data, self.port = folder / "data", free_port()
        # It refuses to be started by root.
        self._as = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        if self._as:
            shutil.chown(folder, "postgres")
        self._run("initdb", f"--pgdata={self.data}", "--auth=trust", "--username=prefect", "-N")
        self.start()
        self._run("createdb", *self._reach, "prefect")

    @property
    def _reach(self) -> list[str]:
        return ["--host=127.0.0.1", f"--port={self.port}", "--username=prefect"]

    def _run(self, program: str, *options: str) -> str:
        assert PROGRAMS
        done = subprocess.run(
            [*self._as, str(PROGRAMS / program), *options],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self) -> None:
        said = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        log = self.data.with_name("log")
        self._run("pg_ctl", "start", "-w", f"--pgdata={self.data}", f"--log={log}", f"-o{said}")

    def stop(self, how: str) -> None:
        self._run("pg_ctl", "stop", "-w", f"--pgdata={self.data}", f"--mode={how}")

    def kill(self) -> None:
        """End it without warning; it is gone once the processes that it started have seen that."""
        leader = int((self.data / "postmaster.pid").read_text().split()[0])
        its = [leader, *child_processes(leader)]
        os.kill(leader, signal.SIGKILL)
        soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in its))

    def ask(self, query: str) -> str:
        return self._run("psql", *self._reach, "--no-align", "-t", "-c", query, "prefect").strip()


@pytest.fixture
def database():
    # Not below tmp_path, into which another user may not look.
    with tempfile.TemporaryDirectory() as folder:
        made = Postgres(Path(folder))
        yield made
        made.stop("immediate")


@pytest.fixture
def served(tmp_path, database):
    here = Prefect(tmp_path / "prefect")
    home = tmp_path / "home"
    home.mkdir()
    here.environment |= {
        "PREFECT_SERVER_DATABASE_DRIVER": "postgresql+asyncpg",
        "PREFECT_SERVER_DATABASE_HOST": "127.0.0.1",
        "PREFECT_SERVER_DATABASE_PORT": str(database.port),
        "PREFECT_SERVER_DATABASE_USER": "prefect",
        "PREFECT_SERVER_DATABASE_NAME": "prefect",
        "PREFECT_SERVER_DATABASE_PASSWORD": "any",
        "PENSTOCK_HOME": str(home),
        "PENSTOCK_SHARE": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    try:
        here.start()
        yield here
    finally:
        here.stop()


@pytest.mark.timeout(1800)
def test_the_database_is_killed_in_every_stage_and_nothing_is_lost_or_done_twice(
    tmp_path, database, served
):
    served.run(str(ROOT / "deploy" / "setup.sh"), "process")
    served.work()
    write_chats(tmp_path / "chats.jsonl", 400)
    sections = {
        "data": {"datasets": [{"path": str(tmp_path / "chats.jsonl"), "type": "chat"}]},
        "train": {"num_train_epochs": 5},
        "export": {"model_card": False},  # it tells of the commit that trained
    }
    calm = tmp_path / "calm"
    penstock("run", write_run(calm, **sections))
    cached = ["Cached"] * len(PLACES)
    for stage in PLACES:
        folder = tmp_path / stage
        config = write_run(folder, **sections)
        first = served.submit("finetune/finetune", config=str(config))
        soon(lambda at=folder, stage=stage: is_begun(at, stage), 200, every=0.005)
        assert processes_of(first)
        database.kill()
        time.sleep(AWAY_SECONDS)
        database.start()
        assert served.ended(first, 300)["state_type"] == "COMPLETED", served.told
        made = manifests_in(folder)
        again = served.submit("finetune/finetune", config=str(config))
        assert served.ended(again)["state_type"] == "COMPLETED", served.told
        soon(lambda again=again: list(tasks_of(served, again).values()) == cached)
        assert manifests_in(folder) == made
        penstock("artifacts", "verify", "--root", folder)
        assert sealed(folder) == sealed(calm)


def test_a_pipeline_runs_on_postgres_and_goes_on_after_the_database_was_killed(
    tmp_path, database, served
):
    for _ in range(2):  # as after an upgrade
        served.run(str(ROOT / "deploy" / "setup.sh"), "process")
        served.run(PREFECT, "work-pool", "set-concurrency-limit", "penstock", "3")
    assert served.api.get("/work_pools/penstock").json()["concurrency_limit"] == 3
    automations = str(ROOT / "deploy" / "automations" / "crashed.yaml")
    served.run(PREFECT, "automation", "create", "--from-file", automations)
    worker = [sys.executable, str(ROOT / "deploy" / "worker.py"), PREFECT, "worker", "start"]
    served.spawn([*worker, "--pool", "penstock", "--type", "process", "--limit", "1"], "worker")

    def run() -> list[str]:
        before = {each["id"] for each in served.ask("flow_runs")}
        given = ("-p", "config=configs/quickstart.yaml", "-p", 'overrides={"train.max_steps": 2}')
        served.run(PREFECT, "deployment", "run", "finetune/finetune", *given)
        [made] = {each["id"] for each in served.ask("flow_runs")} - before
        assert served.ended(made)["state_name"] == "Completed", served.told
        wanted = {"flow_runs": {"id": {"any_": [made]}}}
        soon(lambda: len(served.ask("task_runs", **wanted)) == 4)
        return sorted(each["state_name"] for each in served.ask("task_runs", **wanted))

    assert run() == ["Completed"] * 4
    home = tmp_path / "home"
    assert (home / "outputs" / "quickstart" / "manifest.json").exists()
    database.stop("immediate")
    database.start()
    assert run() == ["Cached"] * 4
    assert database.ask("select count(*) from flow_run where state_type = 'COMPLETED'") == "2"
