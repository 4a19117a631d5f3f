"""A Prefect server and a worker of the tests' own, spoken to by its command and over HTTP."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import ROOT
from tests.waiting import soon

PREFECT = str(Path(sys.executable).with_name("prefect"))
FLOW = [sys.executable, str(ROOT / "flows" / "finetune.py")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Prefect:
    """One server on loopback with its database in `home`, and workers beside it."""

    def __init__(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self.home, self.port = home, free_port()
        # A connection of each request's own: the server closes one that is idle whenever it likes.
        self.api = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}/api",
            timeout=120,  # with eight runs on two cores a log may take half a minute
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": str(self.api.base_url).rstrip("/"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "0.5",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DO_NOT_TRACK": "1",
            "PENSTOCK_HOME": str(ROOT),
            "PYTHONPATH": "",
        }
        self._server: subprocess.Popen[bytes] | None = None
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._workers = 0

    def start(self) -> None:
        """Begin to serve, and wait until that is so; migrations of the first serve the others."""
        own, migrated = self.home / "prefect.db", Path(os.environ["PENSTOCK_CACHE_HOME"], "prefect")
        if migrated.exists() and not own.exists():
            shutil.copy(migrated, own)
        self._server = self.spawn(
            [PREFECT, "server", "start", "--port", str(self.port), "--no-ui"], "server"
        )

        def is_up() -> bool:
            with suppress(httpx.HTTPError):
                return self.api.get("/health").status_code == 200
            return False

        soon(is_up)
        if own.exists() and not migrated.exists():
            with closing(sqlite3.connect(own)) as of, closing(sqlite3.connect(migrated)) as to:
                of.backup(to)

    def kill(self) -> None:
        """End the server without warning; its database stays."""
        assert self._server
        self._server.kill()
        self._server.wait()

    def work(self, *options: str) -> "subprocess.Popen[bytes]":
        """Start a worker; with the first, its pool."""
        self._workers += 1
        command = [PREFECT, "worker", "start", "--pool", "penstock", "--type", "process", *options]
        worker = self.spawn(command, f"worker-{self._workers}")
        soon(lambda: self.api.get("/work_pools/penstock").status_code == 200)
        return worker

    def spawn(self, command: list[str], name: str) -> "subprocess.Popen[bytes]":
        """A process beside the server, whose words are in `home`."""
        with (self.home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        self._spawned.append(process)
        return process

    def stop(self) -> None:
        """End all of it, the server last."""
        for process in reversed(self._spawned):
            process.terminate()
            process.wait(120)  # with a server to tell of its end, that does not take long
        self.api.close()

    def run(self, *command: str, cwd: Path = ROOT) -> str:
        """What a command says that is to succeed."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def post(self, path: str, body: Any) -> httpx.Response:
        """The answer, once the server's database is free: SQLite takes one writer at a time."""

        def answer() -> httpx.Response | None:
            found = self.api.post(path, json=body)
            return None if found.status_code == 503 else found

        return soon(answer)

    def ask(self, what: str, **wanted: Any) -> list[dict[str, Any]]:
        """All flow runs, task runs or artifacts that Prefect has, or those of some parent."""
        found = self.post(f"/{what}/filter", wanted)
        assert found.status_code == 200, found.text
        return found.json()

    def submit(self, deployment: str, **parameters: Any) -> str:
        """Ask for a run of a deployment; the run's id."""
        there = self.api.get(f"/deployments/name/{deployment}").json()["id"]
        asked = self.post(f"/deployments/{there}/create_flow_run", {"parameters": parameters})
        assert asked.status_code == 201, asked.text
        return asked.json()["id"]

    def ended(self, run: str, seconds: float = 200) -> dict[str, Any]:
        """A flow run, once it came to its end."""

        def look() -> dict[str, Any] | None:
            found = self.api.get(f"/flow_runs/{run}").json()
            ended = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
            return found if found.get("state_type") in ended else None

        try:
            return soon(look, seconds, every=0.5)
        finally:
            self.told = self.logs(run)

    def logs(self, run: str) -> str:
        """What a flow run has logged."""
        wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(line["message"] for line in self.ask("logs", **wanted))
