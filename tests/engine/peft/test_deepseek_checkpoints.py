"""Checkpoints as DeepSeek publishes them: FP8 tiles, and a layer that predicts further tokens."""

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.core.errors import CapabilityError
from penstock.core.files import read_json, write_json
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.export import write_folders
from penstock.engine.hf.prediction_layers import (
    describe_prediction_layers,
    prediction_layers,
    prediction_tensors,
)
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.model_source import ExportFormat
from penstock.estimate.machine import check_model
from penstock.models.registry import get_family
from penstock.pipeline.origins import resolve_model_source
from penstock.rows.tokenizer import load_tokenizer
from tests.engine import runs
from tests.engine.inputs import MODELS
from tests.engine.loops import each, loop_of, save, step
from tests.ranks import on_ranks

LAYERS = 2
LAST = f"model.layers.{LAYERS - 1}."
FURTHER = f"model.layers.{LAYERS}."
TILE = 128


def write_model(folder, model_type="deepseek_v3", **changes):
    """A checkpoint with one layer more than the decoder has, as published ones; its tensors in
    memory."""
    changes = {**MODELS["latent attention"], "num_attention_heads": 8, **changes}
    runs.write_model(folder, num_hidden_layers=LAYERS, **changes)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    more = {f"{FURTHER}{name.removeprefix(LAST)}": t for name, t in tensors.items() if LAST in name}
    more |= {
        f"{FURTHER}eh_proj.weight": torch.randn(32, 64),
        f"{FURTHER}enorm.weight": torch.ones(32),
    }
    more = {name: tensor.bfloat16() for name, tensor in more.items()}
    save_file({**tensors, **more}, file, {"format": "pt"})
    said = read_json(folder / "config.json")
    write_json(folder / "config.json", {**said, "model_type": model_type})
    load_tokenizer("builtin:bytes").save_pretrained(folder)
    return {**tensors, **more}


def test_every_layer_beyond_those_declared_is_refused(tmp_path):
    write_model(tmp_path)
    run = {"model_path": str(tmp_path)}
    check_model(runs.run_config(tmp_path / "out", tmp_path, model=run))
    said = read_json(tmp_path / "config.json")
    told = describe_prediction_layers(tmp_path, LAYERS)
    assert told
    assert "tensors that predict further tokens" in told
    assert describe_prediction_layers(tmp_path, LAYERS + 1) is None
    write_json(tmp_path / "config.json", {**said, "num_nextn_predict_layers": 0})
    with pytest.raises(CapabilityError, match="has 3 layers"):
        check_model(runs.run_config(tmp_path / "out", tmp_path, model=run))


def trained(job):
    loop = loop_of(job)
    loss = step(loop)["loss"]
    save(loop)
    return loss


@pytest.mark.dist
@pytest.mark.slow
def test_a_layer_that_predicts_further_tokens_is_exported_as_it_was(tmp_path):
    runs.write_rows(tmp_path / "packed", 4)
    # Under the name of Kimi K2, whose code is that of DeepSeek V3.
    was = {name: write_model(tmp_path / name, name) for name in ("deepseek_v3", "kimi_k2")}
    made = {
        name: runs.run_config(
            tmp_path / f"{name} run",
            tmp_path / name,
            model={
                "model_path": str(tmp_path / name),
                "tokenizer_path": str(tmp_path / name),
            },
            data_parallel_mode="none",
            moe_bias_update_rate=0.01,
        )
        for name in was
    }
    jobs = {name: runs.job_of(run, tmp_path / "packed") for name, run in made.items()}
    [losses] = on_ranks(1, each, trained, jobs)
    assert losses["deepseek_v3"] == losses["kimi_k2"]
    for name, run in made.items():
        out, saved = tmp_path / f"{name} out", tmp_path / f"{name} run/checkpoints/global_step_1"
        write_folders(saved, resolve_model_source(run), ExportFormat(), out)
        now = load_file(out / "hf/model.safetensors")
        assert now.keys() == was[name].keys()
        for tensor, before in was[name].items():
            is_same = now[tensor].dtype == before.dtype and torch.equal(now[tensor], before)
            assert is_same == tensor.startswith(FURTHER), tensor
        said = read_json(out / "hf/config.json")
        assert (said["model_type"], said["num_nextn_predict_layers"]) == (name, 1)
        quantized = ExportFormat(quantize="int8")
        write_folders(saved, resolve_model_source(run), quantized, tmp_path / f"{name} int8")
        said = read_json(tmp_path / f"{name} int8/hf/config.json")["quantization_config"]
        assert f"{FURTHER}eh_proj" in said["ignore"]
        now = load_file(tmp_path / f"{name} int8/hf/model.safetensors")
        assert torch.equal(now[f"{FURTHER}eh_proj.weight"], was[name][f"{FURTHER}eh_proj.weight"])
    hf = tmp_path / "deepseek_v3 out/hf"
    assert transformers.AutoModelForCausalLM.from_pretrained(hf).num_parameters()


def in_tiles(weight):
    """Codes, and a scale of each tile, as DeepSeek stores them."""
    rows, columns = weight.shape
    grid = torch.zeros(-(-rows // TILE), -(-columns // TILE))
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i, j in torch.cartesian_prod(*map(torch.arange, grid.shape)).tolist():
        at = slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE)
        grid[i, j] = weight[at].abs().max() / 448
        codes[at] = (weight[at] / grid[i, j]).to(torch.float8_e4m3fn)
    return codes, grid


def test_published_tiles_of_every_layer_are_read_also_of_the_one_that_is_not_trained(tmp_path):
    # Of no size a multiple of a tile's.
    ranks: dict[str, Any] = {"kv_lora_rank": 200, "q_lora_rank": 136, "moe_intermediate_size": 136}
    tensors = write_model(tmp_path, **ranks)
    kept = ("embed_tokens", "lm_head", "norm", ".gate.", "eh_proj")
    stored, wanted = {}, {}
    for name, tensor in tensors.items():
        stored[name] = wanted[name] = tensor
        if not any(part in name for part in kept):
            stored[name], scales = in_tiles(tensor.float())
            stored[f"{name}_scale_inv"] = scales
            whole = scales.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
            rows, columns = tensor.shape
            wanted[name] = stored[name].float() * whole[:rows, :columns]
    save_file(stored, tmp_path / "model.safetensors")
    hf_config = {
        **read_json(tmp_path / "config.json"),
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [TILE, TILE]},
    }
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    base = BaseModelWeights(names, None, hf_config, family.roles, tmp_path)
    with SafetensorsFolder(tmp_path) as folder:
        reader, shapes = base.quantized_reader(folder), names.hf_shapes()
        reader.require(shapes)
        # With the tensors of their scales.
        names_there = prediction_tensors(folder.names(), LAYERS)
        further = prediction_layers(folder, names_there, base.published)
        assert {*shapes, *further.shapes} == wanted.keys()
        for name, tensor in wanted.items():
            if name in further.shapes:
                read = further.read([name])[name]
            else:
                read = reader.box(name, (0,) * tensor.ndim, tensor.shape)
            assert torch.equal(read, tensor), name
