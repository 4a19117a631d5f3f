"""Exports, judged by transformers and peft, which load them and compute."""

import copy
import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from penstock.core.cache.stage import Artifact
from penstock.core.errors import ArtifactError, CapabilityError
from penstock.core.files import PART, read_json, regular_files, write_json
from penstock.core.sources.pin import pin_model, pin_tokenizer
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.model_source import LoraArgs, ModelSource
from penstock.export.stage import Export, ExportSettings
from tests.stages.checkpoints import FOLDER, trained_artifact

# peft asks transformers for a name that transformers has since changed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2 tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
}
TARGETS = ["q_proj", "v_proj", "down_proj"]
RANK, ALPHA = 4, 12
IDS = torch.randint(0, 259, (2, 17), generator=torch.Generator().manual_seed(0))


def random_model(config: PretrainedConfig, seed: int = 0):
    torch.manual_seed(seed)
    own = copy.deepcopy(config)  # models write into their config
    model = AutoModelForCausalLM.from_config(own, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start at 1 and 0
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(IDS, use_cache=False).logits.float()


def loaded(folder, **options):
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def parameters_of(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def export_of(trained: Artifact, config_path, model_path=None, alpha=None, **settings) -> Export:
    return Export(
        settings=ExportSettings(**settings),
        trained=trained,
        origin=ModelSource(
            config=pin_model(str(config_path)),
            weights=pin_model(str(model_path)) if model_path else None,
            tokenizer=pin_tokenizer("builtin:bytes"),
            config_path=str(config_path),
            model_path=str(model_path) if model_path else None,
            tokenizer_path="builtin:bytes",
            seed=7,
            adapting=LoraArgs(alpha) if alpha else None,
        ),
    )


def saved_config(config: PretrainedConfig, folder, **more):
    write_json(folder / "config.json", {**config.to_dict(), **more})
    return folder


def test_a_form_that_is_written_is_that_of_the_folders(tmp_path, monkeypatch):
    forms = []

    def write_folders(_checkpoint, _origin, form, _out):
        forms.append(form)
        return {"folders": []}

    monkeypatch.setattr("penstock.engine.hf.export.write_folders", write_folders)
    config = CONFIGS["qwen3"]
    trained = trained_artifact(tmp_path / "train", parameters_of(random_model(config)))
    written = {"dtype": "float16", "mtp": "drop", "merge_lora": False}
    folder = saved_config(config, tmp_path / "config")
    export_of(trained, folder, **written, model_card=False).run(tmp_path / "out")
    assert (forms[0].dtype, forms[0].mtp, forms[0].merged) == ("float16", "drop", False)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_transformers_computes_from_the_export_what_was_trained(tmp_path, config):
    model = random_model(config)
    trained = trained_artifact(tmp_path / "train", parameters_of(model))
    stage = export_of(trained, saved_config(config, tmp_path / "config"))
    facts = stage.run(tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out/hf")), logits(model), atol=0, rtol=0)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["shards"] == 1
    assert facts["folders"] == {"hf": "hf"}


def test_the_exported_tokenizer_and_generation_config_are_those_of_training(tmp_path):
    config = CONFIGS["qwen3"]
    trained = trained_artifact(tmp_path / "train", parameters_of(random_model(config)))
    export_of(trained, saved_config(config, tmp_path / "config")).run(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/hf")
    text = "añ→\n 7+5"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    generation = loaded(tmp_path / "out/hf").generation_config
    assert generation.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_shards_hold_the_same_tensors_as_one_file(tmp_path):
    config = CONFIGS["qwen2 tied"]
    trained = trained_artifact(tmp_path / "train", parameters_of(random_model(config)))
    saved_config(config, tmp_path / "config")
    export_of(trained, tmp_path / "config").run(tmp_path / "one")
    several = export_of(trained, tmp_path / "config", max_shard_bytes=20_000)
    facts = several.run(tmp_path / "several")
    whole = load_file(tmp_path / "one/hf/model.safetensors")
    index = json.loads((tmp_path / "several/hf/model.safetensors.index.json").read_text())
    assert facts["shards"] == len(set(index["weight_map"].values())) > 3
    assert set(index["weight_map"]) == set(whole)
    for name, file in index["weight_map"].items():
        torch.testing.assert_close(
            load_file(tmp_path / "several/hf" / file)[name], whole[name], atol=0, rtol=0
        )
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    torch.testing.assert_close(
        logits(loaded(tmp_path / "several/hf")), logits(loaded(tmp_path / "one/hf"))
    )


def contents(folder) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in regular_files(folder)
        if p.suffix != PART
    }


def test_rerun_after_a_crash_keeps_finished_shards_and_gives_the_same_bytes(tmp_path, monkeypatch):
    config = CONFIGS["llama"]
    trained = trained_artifact(tmp_path / "train", parameters_of(random_model(config)))
    saved_config(config, tmp_path / "config")
    stage = export_of(trained, tmp_path / "config", max_shard_bytes=20_000)
    whole = stage.run(tmp_path / "whole")

    read, seen = CheckpointReader.read, []

    def dies_at_the_third(self, names):
        seen.append(names)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return read(self, names)

    monkeypatch.setattr(CheckpointReader, "read", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        stage.run(tmp_path / "out")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/hf").glob("*.safetensors")}
    assert len(kept) == 2
    (tmp_path / "out/hf/model-00003.part").write_bytes(b"half")
    monkeypatch.undo()
    assert stage.run(tmp_path / "out") == whole
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
    (tmp_path / "out/hf/model-00003.part").unlink()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_dtype_follows_the_base_model_and_a_written_one_wins(tmp_path):
    config = CONFIGS["qwen3"]
    model = random_model(config)
    trained = trained_artifact(tmp_path / "train", parameters_of(model))
    base = tmp_path / "base"
    model.to(torch.bfloat16).save_pretrained(base)
    from_base = export_of(trained, base, model_path=base)
    assert from_base.run(tmp_path / "auto")["dtype"] == "bfloat16"
    assert loaded(tmp_path / "auto/hf", dtype="auto").dtype == torch.bfloat16
    # A config that declares no dtype, and one of transformers 4.
    declared = read_json(base / "config.json")
    del declared["dtype"]
    for name, entries in {"none": {}, "old": {"torch_dtype": "bfloat16"}}.items():
        write_json(base / "config.json", {**declared, **entries})
        assert export_of(trained, base, model_path=base).run(tmp_path / name)["dtype"] == "bfloat16"
        exported = read_json(tmp_path / name / "hf/config.json")
        assert exported["dtype"] == "bfloat16"
        # What transformers 4 reads.
        assert exported.get("torch_dtype") == entries.get("torch_dtype")
    half = export_of(trained, base, model_path=base, dtype="float16")
    half.run(tmp_path / "half")
    tensors = load_file(tmp_path / "half/hf/model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    at_random = export_of(trained, saved_config(config, tmp_path / "c", dtype="bfloat16"))
    assert at_random.run(tmp_path / "random")["dtype"] == "float32"


def test_the_tokenizer_files_and_generation_config_of_a_base_model_are_kept_byte_for_byte(
    tmp_path,
):
    config = CONFIGS["qwen3"]
    model = random_model(config)
    base = tmp_path / "base"
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(base)
    trained = trained_artifact(tmp_path / "train", parameters_of(model))
    export_of(trained, base, model_path=base).run(tmp_path / "built-in")
    shutil.copytree(tmp_path / "built-in/hf", tmp_path / "typed")
    (tmp_path / "typed/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    stage = export_of(trained, base, model_path=base)
    typed = str(tmp_path / "typed")
    origin = replace(stage.origin, tokenizer_path=typed, tokenizer=pin_tokenizer(typed))
    stage = replace(stage, origin=origin)
    stage.run(tmp_path / "out")
    hf = tmp_path / "out/hf"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (hf / name).read_bytes() == (tmp_path / "typed" / name).read_bytes()
    assert json.loads((hf / "generation_config.json").read_text())["temperature"] == 0.7


def with_adapter(model):
    """The model in peft's hands, with an adapter that changes what it computes."""
    adapted = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0)
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return adapted.eval()


def saved_factors(adapted) -> dict[str, torch.Tensor]:
    """peft's factors under the names that checkpoints have for them, written out by hand."""
    found = {}
    for name, tensor in adapted.named_parameters():
        if "lora_" not in name:
            continue
        module, side = name.removeprefix("base_model.model.").split(".lora_")
        found[f"{module}.lora_{side[0]}.{module.rpartition('.')[2]}"] = tensor
    return found


@pytest.fixture(params=["base model", "seed"])
def lora_run(request, tmp_path):
    """An export stage maker of a LoRA run, and peft's own model of it."""
    config = CONFIGS["qwen3"]
    path = saved_config(config, tmp_path / "config")
    model_path = None
    model = random_model(config)
    if request.param == "base model":
        model_path = path = tmp_path / "base model"
        model.save_pretrained(path)
    if request.param == "seed":
        # What the seed gives is taken from a full export of a run that has not moved.
        from penstock.engine.hf.state_dict import in_source
        from penstock.engine.quantization.quantized_reader import RandomInitTensors
        from penstock.models.registry import get_family

        hf_config = json.loads((path / "config.json").read_text())
        family = get_family(hf_config)
        names = family.weight_map(family.read(hf_config))
        start = in_source(RandomInitTensors(names, seed=7), names)
        model.load_state_dict(start.read(list(start.shapes)))
    adapted = with_adapter(model)
    trained = trained_artifact(tmp_path / "train", saved_factors(adapted), adapter_only=True)

    def stage(**settings) -> Export:
        return export_of(trained, path, model_path=model_path, alpha=ALPHA, **settings)

    return stage, adapted


def test_the_adapter_loads_in_peft_and_the_merged_model_equals_base_plus_adapter(
    lora_run, tmp_path, monkeypatch
):
    stage, adapted = lora_run
    want = logits(adapted)
    facts = stage().run(tmp_path / "out")
    base = stage().origin.model_path or tmp_path / "out/base"
    monkeypatch.chdir(tmp_path / "out/adapter")  # what the adapter calls its base is relative
    with_peft = PeftModel.from_pretrained(loaded(base), tmp_path / "out/adapter")
    torch.testing.assert_close(logits(with_peft), want, atol=1e-6, rtol=1e-5)
    by_name = AutoPeftModelForCausalLM.from_pretrained(
        ".", dtype=torch.float32, attn_implementation="eager"
    )
    torch.testing.assert_close(logits(by_name), want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(logits(loaded(tmp_path / "out/hf")), want, atol=1e-4, rtol=1e-5)
    assert (logits(loaded(base)) - want).abs().max() > 0.01  # the adapter does something
    assert facts["adapter"]["target_modules"] == sorted(TARGETS)
    assert facts["adapter"]["parameters"] == sum(
        p.numel() for name, p in adapted.named_parameters() if "lora_" in name
    )
    assert ("base" in facts["folders"]) == (stage().origin.model_path is None)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_that_were_trained_with_the_adapter_are_exported_with_it(tmp_path, bias):
    model = random_model(CONFIGS["qwen2 tied"])
    base = tmp_path / "base"
    model.save_pretrained(base)
    before = {name: tensor.clone() for name, tensor in parameters_of(model).items()}
    how = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]}
    adapted = get_peft_model(model, LoraConfig(bias=bias, **how)).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    want = logits(adapted)
    biases = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter
        for name, parameter in adapted.named_parameters()
        if name.endswith(".bias") and parameter.requires_grad
    }
    assert len(biases) == 2 * (1 if bias == "lora_only" else 3)
    tensors = {**saved_factors(adapted), **biases}
    trained = trained_artifact(tmp_path / "train", tensors, adapter_only=True)
    stage = export_of(trained, base, model_path=base, alpha=ALPHA)
    origin = replace(stage.origin, adapting=LoraArgs(ALPHA, bias=bias))
    replace(stage, origin=origin).run(tmp_path / "out")
    merged = loaded(tmp_path / "out/hf")
    torch.testing.assert_close(logits(merged), want, atol=1e-4, rtol=1e-5)
    for name, tensor in parameters_of(merged).items():
        if name.endswith(".bias"):
            assert torch.equal(tensor, biases.get(name, before[name])), name
            assert torch.equal(tensor, before[name]) == (name not in biases), name
    with_peft = PeftModel.from_pretrained(loaded(base), tmp_path / "out/adapter")
    torch.testing.assert_close(logits(with_peft), want, atol=1e-6, rtol=1e-5)


def test_of_adapters_that_were_merged_while_training_the_whole_model_alone_is_exported(tmp_path):
    config = CONFIGS["qwen3"]
    start, learnt = random_model(config), random_model(config)
    start.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in learnt.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    base = parameters_of(learnt)
    adapted = with_adapter(learnt)
    tensors = {**base, **saved_factors(adapted)}
    trained = trained_artifact(tmp_path / "train", tensors, adapter_only=False)
    model_path = tmp_path / "base"
    facts = export_of(trained, model_path, model_path=model_path, alpha=ALPHA).run(tmp_path / "out")
    assert facts["folders"] == {"hf": "hf"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"hf"}
    mine = logits(loaded(tmp_path / "out/hf"))
    torch.testing.assert_close(mine, logits(adapted), atol=1e-4, rtol=1e-5)


def test_without_merging_only_the_adapter_is_exported(lora_run, tmp_path):
    stage, _ = lora_run
    facts = stage(merge_lora=False).run(tmp_path / "out")
    assert "hf" not in facts["folders"]
    assert not (tmp_path / "out/hf").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out/adapter").chat_template


def test_a_checkpoint_whose_save_did_not_end_is_refused(tmp_path):
    config = CONFIGS["llama"]
    trained = trained_artifact(tmp_path / "train", parameters_of(random_model(config)))
    (trained.path / FOLDER / "COMPLETE").unlink()
    with pytest.raises(ArtifactError, match="not a complete checkpoint"):
        export_of(trained, saved_config(config, tmp_path / "config")).run(tmp_path / "out")


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape(tmp_path):
    trained = trained_artifact(tmp_path / "train", parameters_of(random_model(CONFIGS["llama"])))
    other = LlamaConfig(**{**SIZES, "intermediate_size": 64})
    with pytest.raises(ArtifactError, match=r"gate_proj.weight is \(48, 32\).*makes it \(64, 32\)"):
        export_of(trained, saved_config(other, tmp_path / "config")).run(tmp_path / "out")


def test_adapters_that_the_config_does_not_know_of_are_refused(lora_run, tmp_path):
    stage, _ = lora_run
    aware = stage()
    unaware = replace(aware, origin=replace(aware.origin, adapting=None))
    with pytest.raises((ArtifactError, CapabilityError), match="adapters"):
        unaware.run(tmp_path / "out")
