"""What every test stands on: kernels interpreted without a GPU, caches of its own, no network."""

import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

# Set before triton is first imported: without a GPU, kernels run in Triton's interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each core has a process of tests already, and threads that wait for one another would wait long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes import the same modules, and each would compile them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest

from penstock.core.machine.linux import num_cpus
from tests.buckets import bucket, s3_server  # noqa: F401 - fixtures for all tests
from tests.turns import TODAY
from tests.warm_ranks import warm_ranks  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
FLOWS = "tests/flows/"

# How long one example takes says more of the machine than of what is tested.
hypothesis.settings.register_profile("any speed", deadline=None)
hypothesis.settings.load_profile("any speed")

sys.dont_write_bytecode = False

# Whoever starts the tests in the background of a script has SIGINT ignored, and so would have every
# process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config):
    """A process for each core where the whole suite is run, and two more: tests of processes wait a
    third of their time, and at the end some have no file left. None but this one where files or
    tests are named: they begin sooner, and can be debugged."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return num_cpus() + 2 if whole else 0


def pytest_collection():
    """A million objects of imported modules live to the end: nobody looks for garbage among
    them."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Those of flows, which go to one process, then files with most long ones: the end is short."""
    long = Counter(item.path for item in items if {"slow", "dist"} & set(item.keywords))
    items.sort(key=lambda item: (not item.nodeid.startswith(FLOWS), -long[item.path]))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config, log):
    """Files of flows go to the same process, as they share a server; every other file to any."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return FLOWS if nodeid.startswith(FLOWS) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_report_header():
    return f"cases that take turns: TEST_DAY={TODAY}"


@pytest.fixture(autouse=True, scope="session")
def _own_caches(tmp_path_factory):
    """Digests remembered by one test run are not those of another, nor of the user."""
    os.environ["PENSTOCK_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shared():
    """Real data beside the repository; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the folder of shared test data is not beside this repository")
    return SHARED
