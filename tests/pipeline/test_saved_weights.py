"""The weights that a finished training run leaves for transformers and peft, by the real stages."""

import pytest
import torch
from peft import LoraConfig, PeftConfig
from transformers import Qwen3ForCausalLM

from penstock.config.loading.load import load
from penstock.core.cache.manifest import MANIFEST
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan
from tests.pipeline.runs import write_chats, write_run
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

LORA = {"enable_lora": True, "lora_rank": 4}
RUNS = {
    "none": ({"train": {"save_hf_weights": False}}, None),
    "model": ({"model": {"merge_qkv": False}}, {"hf"}),
    "merged": ({"lora": LORA}, {"adapter", "base", "hf"}),
    "adapter alone": (
        {"lora": {**LORA, "lora_dropout": 0.1, "save_lora_only": True}},
        {"adapter", "base"},
    ),
    "merged while training": ({"lora": {**LORA, "merge_lora_interval": 1}}, {"hf"}),
}


def bring_up_training(configs):
    """Prepare, pack and train on this rank alone, for each config."""
    for config in configs:
        planned = plan(load(config), ("train",), ranks="this_process")
        for step in planned.steps:
            execute_stage(step, planned.run, RebuildOptions(), lambda _: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One finished training run in a folder of its own for each of RUNS."""
    folder = tmp_path_factory.mktemp("saved")
    chats = write_chats(folder / "chats.jsonl")
    configs = []
    for name, (sections, _) in RUNS.items():
        written = {
            "model": {
                "config_path": "builtin:tiny-qwen3",
                "foundation": {"num_hidden_layers": 1, "hidden_size": 32},
                **sections.get("model", {}),
            },
            "data": {
                "datasets": [{"path": str(chats), "type": "chat"}],
                "dataset_prepared_path": str(folder / "prepared"),
            },
            "train": {"max_steps": 1, "save_steps": 0, **sections.get("train", {})},
            "lora": sections.get("lora", {}),
        }
        configs.append(write_run(folder / name, **written))
    on_ranks(1, bring_up_training, configs)
    return folder


def checkpoint_of(folder, name):
    return folder / name / "out" / "checkpoints" / "global_step_1"


@pytest.mark.parametrize("name", RUNS)
def test_the_last_checkpoint_holds_the_folders_that_were_asked_for(name, folder):
    saved = checkpoint_of(folder, name) / "hf_ckpt"
    folders = RUNS[name][1]
    assert (folder / name / "out" / MANIFEST).is_file()
    assert saved.is_dir() == (folders is not None)
    if folders is not None:
        assert {path.name for path in saved.iterdir()} == folders


def test_what_transformers_and_peft_find_there_is_what_was_trained(folder):
    checkpoint = checkpoint_of(folder, "model")
    model = Qwen3ForCausalLM.from_pretrained(checkpoint / "hf_ckpt" / "hf")
    reader = CheckpointReader(checkpoint)
    trained = reader.read(sorted(reader.shapes()))
    assert trained.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), trained[name], rtol=0, atol=0)
    adapter = checkpoint_of(folder, "adapter alone") / "hf_ckpt" / "adapter"
    found = PeftConfig.from_pretrained(str(adapter))
    assert isinstance(found, LoraConfig)
    assert (found.r, found.lora_dropout) == (4, 0.1)
