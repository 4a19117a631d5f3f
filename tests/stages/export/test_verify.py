"""`export.verify`: folders that transformers or PEFT would not load, or would load as another
model, are noticed before they are sealed."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig

from penstock.config.loading.load import loads
from penstock.core.cache.stage import stage_key
from penstock.core.errors import StageError
from penstock.engine.hf import save_model
from penstock.engine.hf.verify_folder import verify_adapter, verify_model
from penstock.export.merge import merge_folders
from penstock.export.stage import Export
from penstock.pipeline.plan import export_step
from tests.models.stored import to_hf
from tests.models.twins import FAMILIES, HYBRID, SPARSE, VARIANTS, hf_model, ours_with
from tests.stages.checkpoints import trained_artifact
from tests.stages.export.test_export import (
    CONFIGS,
    SIZES,
    export_of,
    parameters_of,
    random_model,
    saved_config,
)

OF_EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
EXPERTS = Qwen3MoeConfig(**SIZES, **OF_EXPERTS)
CONV1D = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64)
COMPUTING = {
    "dense": (CONFIGS["qwen2 tied"], "o_proj.weight"),
    "experts": (EXPERTS, "down_proj.weight"),
    "transformers backend": (CONV1D, "c_proj.weight"),
}
MODELS = sorted({*FAMILIES, *SPARSE, *HYBRID, *VARIANTS})


def in_checkpoint(model):
    """The parameters by the names, and in the form, of a training checkpoint."""
    if isinstance(model, GPT2LMHeadModel):
        return {
            name: value.t().contiguous() if "c_" in name and value.ndim == 2 else value
            for name, value in model.named_parameters()
        }
    pair = ours_with(model, merge_qkv=False)
    native = dict(pair.ours.named_parameters()).items()
    return {
        at: value for name, row in native for at, value in to_hf(pair.weights, name, row).items()
    }


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def rename(tensors):
    tensors["model.layers.1.self_attn.q_prj.weight"] = tensors.pop(
        "model.layers.1.self_attn.q_proj.weight"
    )


def cut(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def halve(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()


DAMAGE = {
    "renamed": (rename, "1 missing (model.layers.1.self_attn.q_proj.weight), 1 unexpected"),
    "cut": (cut, "1 mismatched (model.norm.weight ((31,) for (32,)))"),
    "other dtype": (halve, "dtype float32, and 1 tensors are of another (lm_head.weight)"),
}


@pytest.fixture
def stage(tmp_path):
    config = CONFIGS["qwen3"]
    trained = trained_artifact(tmp_path / "train", parameters_of(random_model(config)))
    return export_of(trained, saved_config(config, tmp_path / "config", dtype="float32"))


@pytest.mark.parametrize("name", DAMAGE)
def test_tensors_that_are_not_the_models_are_named_before_the_export_is_sealed(
    name, stage, tmp_path, monkeypatch
):
    change, fault = DAMAGE[name]
    write = save_model.write_weights

    def damaged(weights, out, **how):
        shards = write(weights, out, **how)
        edit(out, change)
        return shards

    monkeypatch.setattr(save_model, "write_weights", damaged)
    with pytest.raises(StageError) as refused:
        stage.run(tmp_path / "out")
    assert fault in str(refused.value)
    replace(stage, verify="off").run(tmp_path / "unverified")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTING)
def test_logits_of_other_weights_are_noticed(name, tmp_path, monkeypatch):
    config, changed = COMPUTING[name]

    def negate(tensors):
        for tensor in [at for at in tensors if at.endswith(changed)]:
            tensors[tensor].neg_()

    model = random_model(config)
    trained = trained_artifact(tmp_path / "train", in_checkpoint(model))
    stage = export_of(trained, saved_config(config, tmp_path / "config"))
    replace(stage, verify="logits").run(tmp_path / "out")
    write = save_model.write_weights

    def swapped(weights, out, **how):
        shards = write(weights, out, **how)
        edit(out, negate)
        return shards

    monkeypatch.setattr(save_model, "write_weights", swapped)
    stage.run(tmp_path / "loads")
    with pytest.raises(StageError, match="logits in transformers differ"):
        replace(stage, verify="logits").run(tmp_path / "differs")


@pytest.mark.parametrize("verify", ["load", "logits", "off"])
def test_the_field_arrives_at_the_stage_and_is_not_in_its_key(verify, stage):
    run = loads(
        {
            "model": {"config_path": "builtin:tiny-qwen3"},
            "data": {"datasets": [{"path": "dummy"}]},
            "train": {"output_dir": "out"},
            "export": {"verify": verify},
        }
    )
    made = export_step(run, stage.trained, stage.origin).stage
    assert isinstance(made, Export)
    assert made.verify == verify
    assert stage_key(made) == stage_key(replace(made, verify="load"))


def test_a_tokenizer_that_does_not_load_is_an_error(stage, tmp_path):
    stage.run(tmp_path / "out")
    verify_model(tmp_path / "out/hf")
    (tmp_path / "out/hf/tokenizer.json").write_text("{")
    with pytest.raises(StageError, match="hf/ was written, and transformers does not load it"):
        verify_model(tmp_path / "out/hf")


def test_an_adapter_that_peft_does_not_load_is_named(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = hf_model("qwen3", tied=True)
    config = model.config.to_dict()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    adapted.save_pretrained(tmp_path)
    verify_adapter(tmp_path, config)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    shape = tensors[first].shape
    save_file({first.replace("layers.0", "layers.9"): tensors.pop(first), **tensors}, file)
    with pytest.raises(StageError, match=r"PEFT does not load it: .*1 missing .*1 unexpected"):
        verify_adapter(tmp_path, config)
    save_file({**tensors, first: torch.ones(3, 3)}, file)
    with pytest.raises(StageError, match=r"PEFT does not load it: .*size mismatch"):
        verify_adapter(tmp_path, config)
    save_file({**tensors, first: torch.ones(shape)}, file)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**written, "rank": 2}))
    with pytest.raises(StageError, match="PEFT does not load it: Unexpected keyword"):
        verify_adapter(tmp_path, config)


def test_a_merged_folder_that_does_not_load_is_not_left(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = hf_model("qwen3", tied=True)
    model.save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps({**config, "intermediate_size": 81}))
    with pytest.raises(StageError, match="mismatched"):
        merge_folders(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % 12 == 0 else pytest.mark.exhaustive)
        for number, name in enumerate(MODELS)
    ],
)
def test_what_transformers_saves_is_not_refused(name, tmp_path):
    hf_model(name, tied=False).bfloat16().save_pretrained(tmp_path)
    verify_model(tmp_path)
