"""The language model of a multimodal model, trained as text, and what its exports hold."""

import json

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from penstock.adapters.names import parse_lora_name
from penstock.adapters.peft_format import PREFIX, peft_name
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import read_json, write_json
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.export import write_folders
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import ExportFormat, QuantizationArgs
from penstock.estimate.machine import check_model
from penstock.export.card_text import adapter_snippet, model_snippet
from penstock.export.merge import merge_folders
from penstock.models.multimodal import MULTIMODAL, is_language, stored_name
from penstock.models.registry import get_family
from penstock.pipeline.origins import resolve_model_source, with_adapter
from penstock.rows.tokenizer import load_tokenizer
from tests.engine import runs
from tests.engine.loops import decoder_of, each, loop_of, parameters_of, save, step
from tests.models.multimodal import multimodal_model
from tests.models.twins import documents, packed_logits, their_logits
from tests.ranks import on_ranks
from tests.turns import one_day_in

MODELS = ("qwen3_vl", "gemma3", "qwen2_5_vl", "llava", "smolvlm")
"""The ways to name the backbone in files: `model.language_model`, `model`, `language_model.model`
and `model.text_model`."""


def write_multimodal(folder, model_type):
    """A checkpoint that transformers wrote, in several files, with a processor and a tokenizer; its
    other parts are in other dtypes than the language model."""
    multimodal_model(model_type).save_pretrained(folder, max_shard_size="50KB")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        others = {name: t.bfloat16() for name, t in tensors.items() if not is_language(name)}
        save_file({**tensors, **others}, file, {"format": "pt"})
    load_tokenizer("builtin:bytes").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{ "size":  {"height": 32} }')


def stored(folder):
    """The dtype, shape and bytes of every tensor."""
    found = {}
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:end]).items():
            if name != "__metadata__":
                first, last = (end + offset for offset in entry["data_offsets"])
                found[name] = entry["dtype"], entry["shape"], content[first:last]
    return found


def loaded(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def steps(job):
    loop = loop_of(job)
    model, ids = decoder_of(loop), documents([7, 20])[0]
    begun = packed_logits(model, ids).detach().numpy()
    losses = [step(loop)["loss"] for _ in range(2)]
    save(loop)
    return begun, packed_logits(model, ids).detach().numpy(), losses


def parameters(job):
    return parameters_of(loop_of(job))


def assert_same(theirs, ours):
    """Their logits on each document alone are ours on all in one row."""
    with torch.no_grad():
        wanted = torch.cat([their_logits(theirs, ids) for ids in documents([7, 20])[0]])
    assert (torch.from_numpy(ours) - wanted).norm() <= 1e-5 * wanted.norm()


def assert_kept(model, out):
    """Tensors that are not the language model's, and all other files, are as they were."""
    was, now = stored(model), stored(out)
    assert was.keys() == now.keys()
    others = [tensor for tensor in was if not is_language(tensor)]
    assert {was[tensor][0] for tensor in others} == {"BF16"}
    assert all(now[tensor] == was[tensor] for tensor in others)
    assert read_json(out / "config.json") == read_json(model / "config.json")
    for file in ("preprocessor_config.json", "tokenizer.json"):
        assert (out / file).read_bytes() == (model / file).read_bytes()


LORA = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": ["q_proj", "gate_proj"]}


def trained_and_exported(tmp_path, kinds, lora=None):
    """Train each model type's weights, adapters, or both in turn, and compare its exports with
    transformers and PEFT. Returns the logits before and after, and the losses, of each."""
    runs.write_rows(tmp_path / "packed", 4)
    made, jobs = {}, {}
    for model_type, its in kinds.items():
        model = tmp_path / model_type
        write_multimodal(model, model_type)
        for kind in its:
            name = f"{model_type} {kind}"
            run = runs.run_config(
                tmp_path / name,
                model,
                model={"model_path": str(model), "tokenizer_path": str(model)},
                lora=(lora or LORA) if kind == "adapters" else {},
                data_parallel_mode="none",
                num_train_epochs=2,
            )
            check_model(run)
            made[name], jobs[name] = run, runs.job_of(run, tmp_path / "packed")
    [found] = on_ranks(1, each, steps, jobs)
    for name, (begun, ended, losses) in found.items():
        model_type, kind = name.split()
        model, out = tmp_path / model_type, tmp_path / name / "exported"
        assert_same(loaded(model), begun)
        assert losses[1] < losses[0]
        saved = tmp_path / name / "checkpoints/global_step_2"
        write_folders(saved, resolve_model_source(made[name]), ExportFormat(), out)
        assert_same(loaded(out / "hf"), ended)
        assert_kept(model, out / "hf")
        if kind == "adapters":
            adapted = PeftModel.from_pretrained(loaded(model), out / "adapter")
            assert_same(adapted, ended)
            merge_folders(model, out / "adapter", out / "merged")
            assert_same(loaded(out / "merged"), ended)
    return found


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize(
    "model_type",
    ["ernie4_5_vl_moe", "glm4v", "glm4v_moe", "llama4", "qwen3_5_moe", "qwen3_vl_moe"],
)
def test_language_models_with_experts_are_trained_and_exported_so_too(tmp_path, model_type):
    lora = (
        LORA | {"lora_target_modules": ["q_proj", "gate_up_proj"]}
        if model_type == "glm4v"
        else LORA
    )
    trained_and_exported(tmp_path, {model_type: ("weights", "adapters")}, lora)


@one_day_in(2, of=0)
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_it_is_trained_as_transformers_computes_it_and_all_else_is_exported_as_it_was(
    tmp_path, monkeypatch
):
    # All weights of two, adapters of each.
    both = dict.fromkeys(MODELS[:2], ("weights", "adapters"))
    found = trained_and_exported(tmp_path, both | dict.fromkeys(MODELS[2:], ("adapters",)))
    for model_type in MODELS:
        written = tmp_path / f"{model_type} adapters/exported/adapter/adapter_config.json"
        targets = read_json(written)["target_modules"]
        assert targets[0] == f"{MULTIMODAL[model_type].backbone}layers.0.mlp.gate_proj"
    # As the card says how to load them.
    snippets = {
        "hf": model_snippet("text", MODELS[0]),
        "adapter": adapter_snippet("text", MODELS[0], "of the base"),
    }
    for name, snippet in snippets.items():
        monkeypatch.chdir(tmp_path / f"{MODELS[0]} adapters/exported" / name)
        scope = {}
        exec(snippet.removeprefix("```python\n").partition("inputs =")[0], scope)
        assert_same(scope["model"], found[f"{MODELS[0]} adapters"][1])
        assert len(scope["tokenizer"])
    # Another run goes on from an adapter, on two ranks.
    model, adapter = tmp_path / "qwen2_5_vl", tmp_path / "qwen2_5_vl adapters/exported/adapter"
    resumed = runs.run_config(
        tmp_path / "resumed",
        model,
        model={"model_path": str(model)},
        lora={"enable_lora": True, "init_adapter_path": str(adapter)},
        data_parallel_mode="fsdp2",
        data_parallel_shard_size=2,
    )
    job = runs.job_of(with_adapter(resumed), tmp_path / "packed", adapter=adapter)
    begun = on_ranks(2, parameters, job)[0]
    wanted = {n: t for file in model.glob("*.safetensors") for n, t in load_file(file).items()}
    wanted |= load_file(adapter / "adapter_model.safetensors")
    assert len([name for name in begun if parse_lora_name(name)]) == 8
    for name, value in begun.items():
        stored_as = name
        if parse_lora_name(name):
            stored_as = PREFIX + stored_name(peft_name(name).removeprefix(PREFIX))
        assert np.array_equal(value, wanted[stored_as].numpy()), name


def test_published_codes_of_a_language_model_are_read_and_other_quantized_parts_refused(tmp_path):
    model = multimodal_model("qwen3_vl")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    codes, scales = torch.randn(48, 32).to(torch.float8_e4m3fn), torch.rand(1, 1)
    layer = "layers.1.mlp.up_proj.weight"
    at = f"model.language_model.{layer}"
    save_file({**tensors, at: codes, f"{at}_scale_inv": scales}, tmp_path / "model.safetensors")
    kept = {"quant_method": "fp8", "modules_to_not_convert": ["model.language_model.layers.0"]}
    hf_config = {**read_json(tmp_path / "config.json"), "quantization_config": kept}
    write_json(tmp_path / "config.json", hf_config)
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    run = {"model_path": str(tmp_path)}
    check_model(runs.run_config(tmp_path / "out", tmp_path, model=run))
    for quantizing in (None, QuantizationArgs()):
        base = BaseModelWeights(names, quantizing, hf_config, family.roles, tmp_path)
        with SafetensorsFolder(tmp_path) as folder:
            reader = base.quantized_reader(folder)
            read = reader.box(f"model.{layer}", (0, 0), (48, 32))
            assert torch.equal(read, codes.float() * scales)
            plain = reader.box("model.norm.weight", (0,), (32,))
            assert torch.equal(plain, tensors["model.language_model.norm.weight"])
            if quantizing:
                kept_codes = reader.box(f"model.{layer}.codes", (0, 0), (48, 32))
                assert torch.equal(kept_codes, codes.view(torch.uint8))
    assert f"model.{layer}" in base.formats
    assert not any(".layers.0." in name for name in base.formats)
    vision = "model.visual.merger.linear_fc1.weight"
    quantized = {**tensors, vision: tensors[vision].to(torch.float8_e4m3fn)}
    save_file(quantized, tmp_path / "model.safetensors")
    with pytest.raises(CapabilityError, match=r"linear_fc1.weight of the checkpoint is F8_E4M3"):
        check_model(runs.run_config(tmp_path / "out", tmp_path, model=run))
    with pytest.raises(ConfigError, match=r"model_path is not set.*of a qwen3_vl"):
        check_model(runs.run_config(tmp_path / "out", tmp_path))
