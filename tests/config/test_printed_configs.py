"""A config that is printed, in any form, is the same run when it is read again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.check import print_config
from penstock.config.loading.load import load, loads
from penstock.config.resolve import resolve
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import stage_key
from penstock.core.errors import PenstockError
from penstock.estimate.costs import device_speed
from penstock.pipeline.plan import float32_by_default, plan
from penstock.train.launch.job import RESOLVED_CONFIG, Job
from tests.config.draw_config import draw_config
from tests.config.values import smallest

ROOT = Path(__file__).parents[2]
STAGES = ROOT / "stages" / "penstock"
FOREIGN = ROOT.parent / "shared" / "examples"


@pytest.fixture(autouse=True)
def has_bfloat16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a precision is in float32 on a CPU without them, and its folder says so."""
    monkeypatch.setattr(device_speed, "has_bfloat16_units", lambda: True)


def saved(run: RunConfig, folder: Path) -> str:
    """The config.yaml of a run's output folder."""
    folder.mkdir(exist_ok=True)
    Job("", run, folder, "", (), 0, "", None, folder, "").write()
    return (folder / RESOLVED_CONFIG).read_text()


FORMS: dict[str, Callable[[RunConfig, Path], str]] = {
    "check": lambda run, _: print_config(run, all_fields=False),
    "check --all": lambda run, _: print_config(run, all_fields=True),
    "config.yaml": saved,
}


def planned(run: RunConfig) -> list[tuple[str, str]] | type[PenstockError]:
    """Names and keys of all stages; where a plan is refused, in what way."""
    try:
        return [(step.stage.name, stage_key(step.stage)) for step in plan(run).steps]
    except PenstockError as error:
        return type(error)


def assert_survives_printing(run: RunConfig, folder: Path) -> list[tuple[str, str]] | None:
    """Print the run in every form, read it, and compare all that it is and comes to."""
    steps, resolved = planned(run), resolve(run)
    for name, printed in FORMS.items():
        text = printed(run, folder)
        (folder / "printed.yaml").write_text(text)
        again = load(folder / "printed.yaml")
        assert again == run, name
        assert resolve(again) == resolved, name
        assert planned(again) == steps, name
        assert printed(again, folder) == text, name
    return steps if isinstance(steps, list) else None


def assert_all_survive(seeds: range, folder: Path) -> None:
    count = sum(
        assert_survives_printing(loads(draw_config(seed)), folder) is not None for seed in seeds
    )
    assert count >= len(seeds) // 3  # The others have settings that this machine or model refuses.


@pytest.mark.slow
def test_random_configs_survive_printing(tmp_path: Path) -> None:
    assert_all_survive(range(6), tmp_path)


def test_a_precision_chosen_for_this_machine_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_speed, "has_bfloat16_units", lambda: False)
    run = loads(draw_config(1))
    assert float32_by_default(run)
    printed = tmp_path / "printed.yaml"
    printed.write_text(print_config(run, all_fields=True))
    assert planned(load(printed)) == planned(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1000, 1360, 30))
def test_many_random_configs_survive_printing(first: int, tmp_path: Path) -> None:
    assert_all_survive(range(first, first + 30), tmp_path)


SERVER = "server"
"""A server's file, which is no run."""


def examples() -> list[Path]:
    folders = (
        STAGES / "recipes",
        ROOT / "configs" / "examples",
        ROOT / "configs" / "foreign",
        FOREIGN,
    )
    found = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    kept = [file for file in found if file.stem != SERVER]
    return [ROOT / "configs" / "quickstart.yaml", *kept]


@pytest.mark.parametrize("file", examples(), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_recipe_and_example_survives_printing(file: Path, tmp_path: Path) -> None:
    assert_survives_printing(load(file), tmp_path)


ONCE_LOST: dict[str, dict[str, Any]] = {
    "zero": {"train": {"zero_stage": 2}},
    "bf16": {"train": {"precision": "bf16"}},
    "pushed": {"push": {"url": "file:///models"}},
    "no processes": {"data": {"isolate_samples": True}},
    "rows of a step": {"train": {"global_batch_size": 8, "data_parallel_mode": "none"}},
    "interleaved": {
        "train": {"pipeline_parallel_size": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
    },
    "nf4": {"lora": {"enable_qlora": True, "quant_format": "nf4"}},
    "eval only": {"train": {"eval_only": True}, "data": {"val_set_size": 2}},
}


@pytest.mark.parametrize("name", ONCE_LOST)
def test_what_a_printed_config_once_lost_survives(name: str, tmp_path: Path) -> None:
    assert_survives_printing(loads(smallest(**ONCE_LOST[name])), tmp_path)


def test_a_row_length_that_samples_gave_is_not_printed_as_if_it_were_written(
    tmp_path: Path,
) -> None:
    run = loads(smallest())
    fitted = run.model_copy(update={"data": run.data.with_row_length(512)})
    assert (fitted.data.row_length, fitted.data.last_batch) == (512, "drop_few")
    for name, printed in FORMS.items():
        assert printed(fitted, tmp_path) == printed(run, tmp_path), name


TOLD = {
    "config/schema/run.py": "asks whether a setting was written",
    "config/loading/documented_defaults.py": "notices, and what is no longer told of",
    "config/rules/notices.py": "notices",
    "config/server/config.py": "a server's file, which is not printed",
    "server/launch/addresses.py": "a server's port, which another server may have taken",
    "server/api/routes/weight_sync.py": "the body of a request",
    "server/api/wire/decode_params.py": "the body of a request",
    "engine/distributed/validate_layout.py": "which suggestion comes first",
    "engine/distributed/parallel_dims.py": "which suggestion comes first",
    "estimate/machine.py": "which suggestion comes first",
    "pipeline/plan.py": "the precision of a CPU without units for bfloat16",
    "estimate/costs/find_layouts.py": "which suggestion comes first",
    "estimate/costs/chosen_settings.py": "memory and speed, which no result depends on",
    "prepare/dataset_type.py": "columns that are named, where the type is asked for",
}
"""The files that tell a written default from an unwritten one, and what for."""


def test_no_effect_depends_on_whether_a_value_was_written() -> None:
    words = ("model_fields_set", "is_explicitly_set")
    found = {
        str(file.relative_to(STAGES))
        for file in STAGES.rglob("*.py")
        if any(word in file.read_text() for word in words)
    }
    assert found == set(TOLD)
