"""One Prefect server and one worker for all tests of flows that need them."""

import json
import subprocess
import sys

import cloudpickle
import pytest

from tests.conftest import ROOT
from tests.flows.server import PREFECT, Prefect
from tests.waiting import soon


@pytest.fixture(scope="package")
def prefect(tmp_path_factory):
    """A server; tests that leave it alone begin without waiting for it. It ends with this folder's
    tests: idle it takes a twentieth of a core."""
    here = Prefect(tmp_path_factory.mktemp("prefect"))
    try:
        here.start()
        yield here
    finally:
        here.stop()


@pytest.fixture(scope="package")
def deployed(prefect):
    """The server with a worker and all deployments, as the README makes them."""
    prefect.work("--limit", "4")
    prefect.run(PREFECT, "--no-prompt", "deploy", "--all")
    return prefect


@pytest.fixture
def reporting(prefect, scripts):
    """The server, to which flows report that run in this process."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    del scripts
    with temporary_settings({PREFECT_API_URL: prefect.environment["PREFECT_API_URL"]}):
        yield prefect
        # Else they go on at the end of this process, when the server is gone.
        APILogWorker.drain_all()
        EventsWorker.drain_all()


@pytest.fixture
def dask_of_two_processes(prefect, tmp_path):
    """A scheduler and two workers, started elsewhere by hand; gives the scheduler's address."""
    pytest.importorskip("distributed")
    place = tmp_path / "elsewhere"
    place.mkdir()
    note = place / "scheduler.json"
    told = ["--scheduler-file", str(note), "--no-dashboard"]

    def start(*command: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", *command, *told],
            cwd=place,
            env=prefect.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    started = [start("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0")]
    started += [
        start("distributed.cli.dask_worker", "--nworkers", "1", "--nthreads", "1", "--no-nanny")
        for _ in range(2)
    ]
    try:
        soon(note.is_file)
        yield json.loads(note.read_text())["address"]
    finally:
        for process in started:
            process.kill()  # asked to end, a worker waits long for the flow's server, which is gone
            process.wait()


@pytest.fixture
def scripts(monkeypatch):
    """The folder of flows where Python looks for modules, as it is when one of them runs."""
    monkeypatch.syspath_prepend(str(ROOT / "flows"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "flows")):
            if name in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(sys.modules[name])
            del sys.modules[name]
