"""What every test stands on: kernels interpreted without a GPU, caches of its own, no network."""

import os
import signal
from pathlib import Path

# Set before triton is first imported: without a GPU, kernels run in Triton's interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each core has a process of tests already, and threads that wait for one another would wait long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from penstock.core.machine.linux import num_cpus
from tests.buckets import bucket, s3_server  # noqa: F401 - fixtures for all tests

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

# How long one example takes says more of the machine than of what is tested.
hypothesis.settings.register_profile("any speed", deadline=None)
hypothesis.settings.load_profile("any speed")

# Whoever starts the tests in the background of a script has SIGINT ignored, and so would have every
# process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config):
    """A process for each core where the whole suite is run, and one more: tests of processes wait a
    third of their time. None but this one where files or tests are named: they begin sooner, and
    can be debugged."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return num_cpus() + 1 if whole else 0


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
