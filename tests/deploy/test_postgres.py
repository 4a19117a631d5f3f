"""Prefect on PostgreSQL, set up and served by the files of deploy/, as docs/operations.md says."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.flows.server import PREFECT, Prefect, free_port, soon

FOUND = [*sorted(Path("/usr/lib/postgresql").glob("*/bin")), *map(Path, os.get_exec_path())]
PROGRAMS = next((path for path in FOUND if (path / "initdb").exists()), None)

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
