"""What starting the command may cost: the libraries it must not import, and processor time."""

import resource
import subprocess
import sys

import pytest

from tests.cli.command import small_run

HEAVY = {"torch", "transformers", "datasets", "prefect", "pyarrow", "numpy", "jinja2"}
BUDGETS = {"import penstock": 0.15, "from penstock.cli.main import main; main(['--help'])": 0.4}


def imported_by(code):
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint(*sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import penstock.plan",
        "import penstock.cli.main, penstock.cli.explain, penstock.cli.artifacts",
        "from penstock.cli.main import main; main(['--help'])",
        "from penstock.cli.main import main; main(['plan', 'CONFIG'])",
    ],
)
def test_nothing_heavy_is_imported_before_there_is_work(code, tmp_path):
    config = small_run(tmp_path)
    assert imported_by(code.replace("CONFIG", str(config))) & HEAVY == set()


@pytest.mark.parametrize("code", BUDGETS)
def test_starting_stays_within_its_budget(code):
    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    # Processor seconds, the least of five: what other work on this machine does not add to.
    assert min(seconds() for _ in range(5)) <= BUDGETS[code]
