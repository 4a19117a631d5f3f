"""One Prefect server and one worker for all tests of flows that need them."""

import sys

import pytest

from tests.conftest import ROOT
from tests.flows.server import PREFECT, Prefect


@pytest.fixture(scope="session")
def prefect(tmp_path_factory):
    """A server; tests that leave it alone begin without waiting for it."""
    here = Prefect(tmp_path_factory.mktemp("prefect"))
    try:
        here.start()
        yield here
    finally:
        here.stop()


@pytest.fixture(scope="session")
def deployed(prefect):
    """The server with a worker and all deployments, as the README makes them."""
    prefect.work("--limit", "4")
    prefect.run(PREFECT, "--no-prompt", "deploy", "--all")
    return prefect


@pytest.fixture
def scripts(monkeypatch):
    """The folder of flows where Python looks for modules, as it is when one of them runs."""
    monkeypatch.syspath_prepend(str(ROOT / "flows"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "flows")):
            del sys.modules[name]
