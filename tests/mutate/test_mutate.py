import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conftest import ROOT
from tests.mutate.fields import all_fields
from tests.mutate.planted import Bug, judge, read_bugs
from tests.mutate.running import STARTUP, VARIABLE
from tests.mutate.table import exists, read_rows

OUTCOMES = {"noticed", "refused", "explained", "not run"}
SAMPLE = ("release.mode", "release.min_delta")
READING = """if True:
    import os
    from penstock.config.loading.load import loads
    from penstock.core.errors import ConfigError
    run = {
        "model": {"config_path": "builtin:tiny-qwen3"},
        "data": {"datasets": [{"path": "dummy"}]},
        "train": {"output_dir": "o", "lr": 1e-3, "lr_min": 1e-4, "lr_decay_style": "cosine"},
    }
    if os.fork():
        os.wait()
    read = loads(run).train
    print(read.lr_min, read.lr)
    run["train"]["lr_min"] = 1e-2
    try:
        loads(run)
    except ConfigError as error:
        print(str(error).partition(":")[0])
"""


def run(*words, **more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**kept, **more},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_field_has_a_row_and_no_row_is_of_a_field_that_is_gone():
    assert read_rows().keys() == all_fields().keys()


@pytest.mark.slow
def test_the_tests_of_the_table_exist():
    rows = read_rows().values()
    assert {row.outcome for row in rows} <= OUTCOMES
    assert [row for row in rows if row.outcome != "explained" and not exists(row.told)] == []


@pytest.mark.slow
@pytest.mark.parametrize("validation", [False, True])
def test_processes_read_a_default_and_validation_what_was_written(tmp_path, validation):
    mutant = tmp_path / "mutant.json"
    mutant.write_text(json.dumps(all_fields()["train.lr_min"].mutant(validation=validation)))
    paths = {"PYTHONPATH": f"{STARTUP}:{os.environ.get('PYTHONPATH', '')}"}
    told = run("-c", READING, **paths, **{VARIABLE: str(mutant)})
    refused = [] if validation else ["train.lr_min"]
    assert told.stdout.split() == ["1e-07", "0.001", *refused] * 2, told.stderr


@pytest.mark.slow
def test_a_sample_of_mutants_is_noticed():
    told = run("-m", "tests.mutate", "--no-preload", *(f"--field={name}" for name in SAMPLE))
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.slow
def test_a_mutant_that_no_test_notices_is_told():
    test = "tests/mutate/test_mutate.py::test_the_tests_of_the_table_exist"
    told = run("-m", "tests.mutate", "--no-preload", f"--field={SAMPLE[0]}", f"--test={test}")
    assert told.returncode == 1, told.stderr
    assert f"SURVIVED  {SAMPLE[0]} " in told.stdout


@pytest.mark.slow
def test_bugs_are_planted_where_they_were_written_and_a_test_notices_them(tmp_path):
    bugs = read_bugs()
    assert len({bug.id for bug in bugs}) == len(bugs) >= 100
    assert [bug.id for bug in bugs if not all((ROOT / test).exists() for test in bug.tests)] == []
    stale = [bug.id for bug in bugs if bug.is_stale(ROOT)]
    assert len(stale) <= 5, f"write these again, their places are gone: {stale}"
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/doubling.py").write_text("def double(x):\n    return 2 * x\n")
    test = "from doubling import double\n\ndef test_double():\n    assert double(2) == 4\n"
    (tmp_path / "test_numbers.py").write_text(test)
    bug = Bug("x", "stages/doubling.py", "2 * x", "x * x + x - x", "", ("test_numbers.py",))
    assert judge(bug, tmp_path, 60) == "SURVIVED"
    noticed = judge(replace(bug, new="3 * x"), tmp_path, 60)
    assert noticed == "FAILED test_numbers.py::test_double"
    assert judge(replace(bug, old="4 * x"), tmp_path, 60) == "stale: its place is gone"
