"""Runs tests with and without mutants: forks of one process that has imported what is slow."""

import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

STARTUP = Path(__file__).parent / "startup"
VARIABLE = "MUTATION_FILE"
OPTIONS = (
    *("-q", "-x", "-n", "0", "--no-header", "-p", "no:cacheprovider", "-o", "timeout=90"),
    *("-m", "exhaustive or not exhaustive", "-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


@dataclass(frozen=True)
class Outcome:
    """What came of some tests."""

    status: str
    """`passed`, `failed`, `skipped`, `timeout` or `error` (could not be run)."""
    test: str = ""
    """The first test that failed."""
    reason: str = ""
    seconds: float = 0.0


class Runner:
    """Runs tests in forks of this process, one mutant at a time. Make it before the config is
    imported, which is patched then."""

    def __init__(self, *, preload: bool = True) -> None:
        assert "penstock.config.schema.base" not in sys.modules
        self._folder = Path(tempfile.mkdtemp(prefix="mutate-"))
        self._mutant = self._folder / "mutant.json"
        os.environ[VARIABLE] = str(self._mutant)
        paths = [str(STARTUP), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        sys.path.insert(0, str(STARTUP))
        importlib.import_module("sitecustomize")
        importlib.import_module("tests.conftest")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if preload:
            self._preload()

    def _preload(self) -> None:
        """Import torch and what stands on it here, and in the server that tests fork ranks from."""
        from tests.ranks import PRELOADED

        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
        resource_tracker.ensure_running()
        for plugin in entry_points(group="pytest11"):
            plugin.load()
        for module in (*PRELOADED, "transformers", "datasets", "peft"):
            importlib.import_module(module)
        gc.freeze()

    def run(self, tests: list[str], mutant: dict[str, Any] | None, limit: float = 100) -> Outcome:
        """The outcome of the tests under the mutant: that of the first failure, if any."""
        self._mutant.write_text(json.dumps(mutant or {}))
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            self._run_here(tests, (mutant or {}).get("name", ""), result)
        ended = _wait(child, limit)
        seconds = round(time.monotonic() - began, 1)
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        if not ended:
            return Outcome("timeout", seconds=seconds)
        if not result.is_file():
            log = (self._folder / "log").read_text(errors="replace")
            return Outcome("error", reason=log[-300:], seconds=seconds)
        return Outcome(**json.loads(result.read_text()), seconds=seconds)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run_here(self, tests: list[str], name: str, result: Path) -> None:
        """The fork: never returns."""
        os.setpgid(0, 0)
        # The server of ranks is a child of the parent, which a fork cannot wait for.
        server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
        if server._forkserver_address:
            server.ensure_running = lambda: None
        log = os.open(self._folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            result.write_text(json.dumps(_pytest(tests, name, self._folder / "tmp")))
        except BaseException:  # noqa: BLE001 - told in the log, and by the absence of a result
            traceback.print_exc()
        finally:
            os._exit(0)


def _wait(child: int, limit: float) -> bool:
    """Whether the child ended in time; it is killed otherwise."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


class _Recorder:
    """Runs cases that are named after the field first, and keeps the first failure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed: Any = None
        self.passed = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.name not in item.nodeid.partition("[")[2])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report
        self.passed += report.passed and report.when == "call"


def _pytest(tests: list[str], name: str, folder: Path) -> dict[str, Any]:
    import pytest

    seen = _Recorder(name)
    code = pytest.main([*OPTIONS, f"--basetemp={folder}", *tests], plugins=[seen])
    if seen.failed is not None:
        crash = getattr(seen.failed.longrepr, "reprcrash", None)
        reason = str(getattr(crash, "message", seen.failed.longrepr))[:300]
        status = "timeout" if reason.startswith("Failed: Timeout") else "failed"
        return {"status": status, "test": seen.failed.nodeid, "reason": reason}
    if code not in (0, 1):
        return {"status": "error", "reason": f"pytest ends with {code}"}
    return {"status": "passed" if seen.passed else "skipped"}
