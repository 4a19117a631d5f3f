"""What `import penstock` costs, and what type checkers see of it."""

import json
import resource
import shutil
import subprocess
import sys

import pytest

import penstock as ps
from tests.cli.command import small_run
from tests.conftest import ROOT

HEAVY = {"torch", "numpy", "pyarrow", "datasets", "transformers", "prefect", "typer"}


def modules_after(code):
    script = f"import sys\n{code}\nprint(*sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_imports_nothing_else():
    found = modules_after("import penstock")
    assert {name for name in found if name.startswith("penstock")} == {
        "penstock",
        "penstock.version",
    }
    assert found & {"pydantic", "yaml", *HEAVY} == set()


def test_loading_and_planning_a_run_imports_no_heavy_library(tmp_path):
    config = small_run(tmp_path)
    code = f"import penstock\nrun = penstock.load({str(config)!r}, 'train.lr=1')\nrun.status()"
    found = {name.partition(".")[0] for name in modules_after(f"{code}; repr(run); run.report")}
    assert found & HEAVY == set()


@pytest.mark.slow
def test_importing_costs_little_more_than_python_itself():
    def seconds(code):
        def once():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", code], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

        return min(once() for _ in range(7))

    # Against what importing the config's schema takes, on this machine and under this load.
    empty, ours, whole = (
        seconds(code) for code in ("pass", "import penstock", "import penstock; penstock.RunConfig")
    )
    assert ours - empty < (whole - empty) / 4


def test_every_name_that_is_promised_is_there_and_no_other():
    names: dict[str, object] = {}
    exec("from penstock import *", names)
    assert set(ps.__all__) <= set(names)
    assert set(ps.__all__) <= set(dir(ps))
    for name in ps.__all__:
        assert getattr(ps, name) is names[name]
    with pytest.raises(AttributeError, match="has no attribute 'laod'"):
        _ = ps.laod  # pyright: ignore[reportAttributeAccessIssue]


TYPED = """\
import penstock as ps
from typing import assert_type
from datasets import Dataset

run = ps.load("run.yaml", "train.lr=1", {"train.seed": 2}, train={"lr": 1e-5})
assert_type(run, ps.Run)
assert_type(run.prepare().dataset(), Dataset)
assert_type(run.train(), ps.Training)
assert_type(run.config.train.lr, float)
assert_type(run.run()["train"], ps.Result)
model, tokenizer = run.model()
model.generate
"""

WRONG = (
    "ps.laod('run.yaml')",
    "ps.load(3)",
    "ps.load('run.yaml', trian={'lr': 1})",
    "ps.load('run.yaml', train=1e-5)",
    "run.train(fresh='yes')",
    "run.run(force='trian')",
    "run.prepare().dataset('test')",
)


@pytest.mark.exhaustive
def test_type_checkers_know_the_api_and_refuse_what_it_does_not_take(tmp_path):
    checker = shutil.which("basedpyright") or ROOT / ".venv" / "bin" / "basedpyright"
    file, lines = tmp_path / "typed.py", TYPED.splitlines()
    file.write_text("\n".join([*lines, *WRONG]) + "\n")
    settings = {
        "include": [str(file)],
        "extraPaths": [str(ROOT / "stages"), str(ROOT / "kernels")],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [checker, "--project", tmp_path, "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    found = [
        each["range"]["start"]["line"]
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert sorted(set(found)) == list(range(len(lines), len(lines) + len(WRONG)))
