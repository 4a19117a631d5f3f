"""What starting the command may cost: the libraries it must not import, and how many modules."""

import subprocess
import sys

import pytest
import typer
from typer import Context

from penstock.cli.main import app
from penstock.cli.single_command import select_command
from penstock.export.stage import Export
from penstock.pack.stage import Pack
from penstock.prepare.stage import Prepare
from penstock.train.stage import Train
from tests.cli.command import penstock, small_run

HEAVY = {"torch", "transformers", "datasets", "prefect", "pyarrow", "numpy", "jinja2", "asyncio"}
OF_WORK = {
    "penstock.adapters.match_targets",
    "penstock.estimate.costs.device_speed",
    "penstock.engine.hf.config",
    "penstock.engine.hf.weight_files",
    "penstock.models.registry",
    "penstock.prepare.notices",
    "penstock.push.stage",
    "penstock.rows.sizing",
    "penstock.train.launch.hang_watchdog",
}
"""What judges or does work, and a run that is finished does without."""
OWN_MODULES = 205
"""As many of our own a finished run may import."""
BUDGETS = {"import penstock": 90, "from penstock.cli.main import main; main(['--help'])": 240}
"""As many modules, the interpreter's own included. bench_start measures the seconds."""


def modules_of(code):
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint(*sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def imported_by(code):
    return {name.partition(".")[0] for name in modules_of(code)}


@pytest.mark.parametrize(
    "code",
    [
        "import penstock.pipeline.plan",
        "import penstock.cli.main, penstock.cli.plan.stages, penstock.cli.artifacts.commands",
        "from penstock.cli.main import main; main(['--help'])",
        "from penstock.cli.main import main; main(['plan', 'CONFIG'])",
    ],
)
def test_nothing_heavy_is_imported_before_there_is_work(code, tmp_path):
    config = small_run(tmp_path)
    assert imported_by(code.replace("CONFIG", str(config))) & HEAVY == set()


@pytest.mark.parametrize("code", BUDGETS)
def test_starting_stays_within_its_budget(code):
    assert len(modules_of(code)) <= BUDGETS[code]


def makes_nothing(_, out):
    (out / "made").touch()
    return {}


@pytest.mark.parametrize("type", ["text", None], ids=["a type", "an inferred type"])
def test_a_finished_run_imports_neither_libraries_nor_what_judges_or_does_work(
    type, monkeypatch, tmp_path
):
    dataset = {"path": str(tmp_path / "rows.jsonl"), "type": type}
    datasets = [{name: value for name, value in dataset.items() if value is not None}]
    # Without a precision, a CPU is looked at for units that compute in bfloat16.
    train = {"enable_mixed_precision": False}
    config = small_run(tmp_path, data={"datasets": datasets}, train=train)
    monkeypatch.setattr("penstock.pipeline.plan._notices", lambda *_: [])
    for stage in (Prepare, Pack, Train, Export):
        monkeypatch.setattr(stage, "run", makes_nothing)
        monkeypatch.setattr(stage, "owned_files", lambda _, out: [out / "made"])
    assert penstock("run", config).code == 0
    found = modules_of(f"from penstock.cli.main import main; main(['run', '{config}'])")
    assert {name.partition(".")[0] for name in found} & HEAVY == set()
    assert found & OF_WORK == set()
    assert len([name for name in found if name.startswith("penstock")]) <= OWN_MODULES


def test_the_parser_of_one_command_is_what_it_is_among_all():
    for name, among_all in typer.main.get_group(app).commands.items():
        alone = typer.main.get_group(select_command(app, name)).commands
        assert list(alone) == [name]
        told = [one.get_help(Context(one, info_name=name)) for one in (among_all, alone[name])]
        assert told[0] == told[1]
    assert select_command(app, "trian") is app


def test_help_lists_all_commands_though_it_builds_no_parser_of_theirs():
    told = [
        one.get_help(Context(one, info_name="penstock"))
        for one in map(typer.main.get_group, (app, select_command(app, "--help")))
    ]
    assert told[0] == told[1]
    assert "artifacts" in told[0]
