"""What `penstock eval` can be asked of, and what it says where it cannot."""

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.console import Console
from penstock.cli.evaluate import EvalOptions, evaluate_target
from penstock.core.cache.record import write_record
from penstock.core.errors import ConfigError, StageError
from tests.config.values import smallest


def refused(target: Path, wanted: EvalOptions, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as told:
        evaluate_target(target, (), wanted, Console())
    return str(told.value)


def run_in(folder: Path, **sections: Any) -> Path:
    """An output folder of a run that has begun."""
    folder.mkdir()
    write_record(folder / "job.json", {"config": smallest(**sections)})
    return folder


def test_what_cannot_be_asked_is_told_with_what_can(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "hf"
    model.mkdir()
    (model / "config.json").write_text("{}")
    run = run_in(
        tmp_path / "run",
        data={"val_set_size": 3, "datasets": [{"path": "builtin:arithmetic", "type": "chat"}]},
    )
    plain = run_in(tmp_path / "plain")
    assert "neither a run nor a model" in refused(tmp_path, EvalOptions())
    assert "nothing to ask it" in refused(model, EvalOptions())
    assert "Add --harness and their names" in refused(run, EvalOptions(harness_tasks=model))
    assert "this run holds nothing out" in refused(plain, EvalOptions())
    assert "is no regular expression" in refused(run, EvalOptions(answer="("))
    assert "prepare has not been run" in refused(run, EvalOptions(), StageError)
    assert "prepare has not been run" in refused(run, EvalOptions(harness="a"), StageError)


def test_a_run_that_only_evaluates_has_no_model_to_ask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only = run_in(
        tmp_path / "only",
        data={"val_set_size": 3, "datasets": [{"path": "builtin:arithmetic", "type": "chat"}]},
        train={"eval_only": True, "output_dir": "out", "data_parallel_mode": "none"},
    )
    assert "nothing to export" in refused(only, EvalOptions())
