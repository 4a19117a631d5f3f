"""Weights that a run starts from, as its plan has them."""

from pathlib import Path

import pytest

from penstock.config.loading.load import loads
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ConfigError
from penstock.pipeline.plan import plan
from penstock.train.stage import Train
from tests.pipeline.runs import write_chats
from tests.pipeline.sections import saved


def trained(chats, sections):
    """The train stage of a run with these sections."""
    run = {"data": {"datasets": [{"path": chats, "type": "chat"}]}, **sections}
    run["train"] = {"output_dir": "out", "data_parallel_mode": "none", **run.get("train", {})}
    stage = plan(loads(run)).step("train").stage
    assert isinstance(stage, Train)
    return stage


def test_weights_to_start_from_stand_in_for_those_of_the_model(tmp_path, monkeypatch):
    """In Hugging Face's format; a checkpoint is taken as it is."""
    monkeypatch.setattr(
        "penstock.pipeline.plan.check_model", lambda _: None
    )  # these weights are none
    chats = str(write_chats(tmp_path / "chats.jsonl"))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config = "builtin:tiny-llama"
    model = {"config_path": config}
    made = {
        "initial": {"model": model, "train": {"init_checkpoint_path": str(tmp_path)}},
        "model": {"model": {**model, "model_path": str(tmp_path), "tokenizer_path": config}},
        "checkpoint": {"model": model, **saved(b"one")(chats)},
        "neither": {"model": model},
    }
    stages = {name: trained(chats, sections) for name, sections in made.items()}
    assert stage_key(stages["initial"]) == stage_key(stages["model"])
    assert stages["initial"].origin == stages["model"].origin
    assert stages["model"].origin.model_path == str(tmp_path)
    assert stages["checkpoint"].origin == stages["neither"].origin
    assert stages["checkpoint"].inputs.keys() - stages["neither"].inputs.keys() == {"initial"}
    assert stage_key(trained(chats, {"model": model, **saved(b"other")(chats)})) not in {
        stage_key(stage) for stage in stages.values()
    }
    (Path(chats).parent / "saved" / "COMPLETE").unlink()
    with pytest.raises(ConfigError, match=r"train\.init_checkpoint_path .* is not a complete"):
        trained(chats, made["checkpoint"])
