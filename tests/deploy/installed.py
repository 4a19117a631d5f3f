"""A wheel of this tree, and what is done with it once it is installed."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx

from tests.conftest import ROOT
from tests.flows.server import free_port
from tests.waiting import soon

PIP = ("-m", "pip", "-q", "--disable-pip-version-check")


def build_wheel(folder: Path) -> Path:
    """The wheel, built into `folder` by the build backend that is installed here."""
    wheel = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *wheel], check=True, timeout=250)
    [file] = folder.glob("*.whl")
    return file


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PENSTOCK_HOME")}
    return {**kept, "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1", **more}


def run_penstock(python: Path, folder: Path, *words: str, **variables: str) -> str:
    """What the command says in `folder`; it has to succeed."""
    done = subprocess.run(
        [python, "-m", "penstock.cli.main", *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def require_server(python: Path, folder: Path) -> None:
    """Start a training server in `folder`, wait until its workers are ready, and end it."""
    run_penstock(python, folder, "init", "server-quickstart")
    port = free_port()
    command = [python, "-m", "penstock.cli.main", "serve", "server-quickstart.yaml"]
    with (folder / "serve.log").open("wb") as log:
        serving = subprocess.Popen(
            [*command, "--server.api_port", str(port)],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def is_ready() -> bool:
        assert serving.poll() is None, (folder / "serve.log").read_text()
        with suppress(httpx.HTTPError):
            told = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
            return told.status_code == 200 and told.json().get("workers") == "ready"
        return False

    try:
        soon(is_ready, 120)
    finally:
        serving.terminate()
        serving.wait(60)
