"""`penstock check`: what can be judged here is, and what cannot is said."""

from pathlib import Path

import pytest
import yaml

from tests.cli.command import penstock, small_run

ASKS_THE_MODEL = {"dropout": {"ffn": 0.1}}


@pytest.mark.parametrize("model", ["nobody/nothing-of-the-kind", "/nowhere/on/this/machine"])
def test_a_model_that_cannot_be_asked_is_left_unjudged(tmp_path: Path, model: str) -> None:
    config = small_run(tmp_path, model={"config_path": model}, train=ASKS_THE_MODEL)
    said = penstock("check", config)
    assert said.code == 0
    assert f"not checked against the model: {model}" in said.err
    assert yaml.safe_load(said.out)["model"]["config_path"] == model
    assert penstock("plan", config).code in (2, 3)


@pytest.mark.parametrize("train", [ASKS_THE_MODEL, {}], ids=["asks the model", "asks nothing"])
def test_a_folder_that_is_called_otherwise_here_is_a_fault(tmp_path: Path, train: dict) -> None:
    (tmp_path / "model").mkdir()
    wrong = str(tmp_path / "modle")
    config = small_run(tmp_path, model={"config_path": wrong}, train=train)
    said = penstock("check", config)
    assert said.code == 2
    assert "did you mean model" in said.err
