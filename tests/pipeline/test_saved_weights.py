"""The weights that a finished training run leaves for transformers and peft, by the real stages."""

import pytest
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.config.load import load
from penstock.plan import Wishes, bring_up, plan
from tests.pipeline.runs import write_run
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

LORA = {"enable_lora": True, "lora_rank": 4}
RUNS = {
    "none": ({"train": {"save_hf_weights": False}}, None),
    "model": ({}, {"hf"}),
    "merged": ({"lora": LORA}, {"adapter", "base", "hf"}),
    "adapter alone": ({"lora": {**LORA, "save_lora_only": True}}, {"adapter", "base"}),
}


def brought_up(configs):
    """Prepare, pack and train on this rank alone, for each config."""
    for config in configs.values():
        planned = plan(load(config), ("train",), ranks="this_process")
        for step in planned.steps:
            bring_up(step, planned.run, Wishes(), lambda _: None)


def test_the_last_checkpoint_holds_the_weights_that_were_asked_for(tmp_path):
    configs = {}
    for name, (sections, _) in RUNS.items():
        train = {"max_steps": 1, "save_steps": 0, **sections.get("train", {})}
        data = {"dataset_prepared_path": str(tmp_path / "prepared")}
        folder = tmp_path / name
        configs[name] = write_run(folder, **{**sections, "train": train, "data": data})
        (folder / "chats.jsonl").unlink()
    E = None
"""
"""
