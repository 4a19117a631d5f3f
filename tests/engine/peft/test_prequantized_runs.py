"""Training adapters beside weights that were published quantized, and what is exported then."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import ConfigError
from penstock.core.files import read_json, write_json
from penstock.engine.distributed.validate_layout import ModelDims, layout_errors
from penstock.engine.hf.export import write_folders
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.save_model import write_weights
from penstock.engine.hf.state_dict import in_source
from penstock.engine.model_source import ExportFormat
from penstock.engine.quantization.export import quantizer_for
from penstock.engine.quantization.prequantized import published_in
from penstock.engine.quantization.quantized_reader import RandomInitTensors
from penstock.estimate.machine import why_cannot_train
from penstock.models.registry import get_family
from penstock.pipeline.origins import resolve_model_source
from penstock_kernels.quant import dequantize
from tests.engine import runs
from tests.engine.loops import each, loop_of, parameters_of, save, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

TINY = {
    **runs.TINY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "dtype": "float32",
}
ADAPTERS = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": ["q_proj", "up_proj"]}


def publish(folder, scheme, max_shard_size="5GB", **changes):
    """A model that compressed-tensors' users would publish, and FP8 as its own publishers do."""
    config = {**TINY, **changes}
    family = get_family(config)
    names = family.weight_map(family.read(config))
    quantizer, folder = quantizer_for(scheme, family, names), folder / scheme
    folder.mkdir()
    source, how = in_source(RandomInitTensors(names, 3), names), {"quantizer": quantizer}
    write_weights(source, folder, dtype=torch.float32, max_shard_size=max_shard_size, **how)
    said = quantizer.config
    if scheme == "block_fp8":
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            inverse = {n.replace("_scale", "_scale_inv"): t for n, t in tensors.items()}
            save_file(inverse, file, {"format": "pt"})
        for index in folder.glob("*.index.json"):
            index.write_text(index.read_text().replace("_scale", "_scale_inv"))
        said = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    write_json(folder / "config.json", {**config, "quantization_config": said})
    return folder


def dequantized(folder, out):
    """The same model in floats; also which of its tensors were codes."""
    config = read_json(folder / "config.json")
    published = published_in(config, folder)
    assert published is not None
    tensors, codes = {}, {}
    family = get_family(config)
    with SafetensorsFolder(folder) as opened:
        for name in family.weight_map(family.read(config)).hf_shapes():
            if published.reader.is_quantized(opened, name):
                whole = published.reader.rows(
                    opened, name, 0, published.reader.shape(opened, name)[0]
                )
                tensors[name], codes[name] = dequantize(whole, torch.float32), whole.codes.numpy()
            else:
                tensors[name] = opened[name]
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    del config["quantization_config"]
    write_json(out / "config.json", config)
    return tensors, codes


def run_of(out, model, merge_qkv=True, **lora):
    named = {"model_path": str(model), "tokenizer_path": "builtin:bytes"}
    settings = {**named, "merge_qkv": merge_qkv}
    lora = {**ADAPTERS, **lora} if lora.get("enable_lora", True) else {}
    return runs.run_config(out, model, model=settings, lora=lora, data_parallel_mode="none")


def steps(job):
    loop = loop_of(job)
    begun = parameters_of(loop)
    records = [step(loop), step(loop)]
    save(loop)
    return begun, parameters_of(loop), [record["loss"] for record in records]


def test_adapters_learn_beside_published_codes_as_beside_the_floats_they_stand_for(tmp_path):
    runs.write_rows(tmp_path / "packed", 8)
    jobs, floats = {}, {}
    for scheme in ("nvfp4", "block_fp8"):
        model, plain = publish(tmp_path, scheme), tmp_path / f"{scheme} floats"
        floats[scheme] = dequantized(model, plain)
        for kind, at, lora in (("codes", model, {"enable_qlora": True}), ("floats", plain, {})):
            run = run_of(tmp_path / f"{scheme} {kind} out", at, **lora)
            assert why_cannot_train(run) is None
            jobs[f"{scheme} {kind}"] = runs.job_of(run, tmp_path / "packed")
    [found] = on_ranks(1, each, steps, jobs)
    for scheme, (tensors, codes) in floats.items():
        begun, ended, losses = found[f"{scheme} codes"]
        assert len(codes) == 7
        for name, stored in codes.items():
            # As published, to the bit, before and after.
            assert np.array_equal(begun[f"{name}.codes"], stored)
            assert np.array_equal(ended[f"{name}.codes"], stored)
            assert name not in begun
        _, plain, wanted = found[f"{scheme} floats"]
        assert losses == pytest.approx(wanted, rel=1e-6)
        factors = [name for name in ended if "lora_" in name]
        assert len(factors) == 4
        for name in factors:
            np.testing.assert_allclose(ended[name], plain[name], rtol=1e-3, atol=1e-6)
        job = jobs[f"{scheme} codes"]
        out = job.output_dir / "exported"
        saved = job.output_dir / "checkpoints" / "global_step_2"
        write_folders(saved, resolve_model_source(job.config), ExportFormat(), out)
        # What is merged is floats, and says so.
        assert "quantization_config" not in read_json(out / "hf/config.json")
        merged = load_file(out / "hf/model.safetensors")
        assert set(merged) == set(tensors)
        for name, tensor in tensors.items():
            is_adapted = name.removesuffix(".weight").endswith(("q_proj", "up_proj"))
            assert torch.equal(merged[name], tensor) != is_adapted


def test_runs_that_would_not_use_published_codes_are_refused_before_any_work(tmp_path):
    model = publish(tmp_path, "block_fp8")
    refusal = why_cannot_train(
        run_of(tmp_path / "out", model, enable_qlora=True, quant_format="nf4")
    )
    assert isinstance(refusal, ConfigError)
    assert re.search("(?s)quant_format is nf4, .* block_fp8", str(refusal))


MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("changes", "merge_qkv", "max_shard_size"),
    [
        ({"tie_word_embeddings": True}, True, "100KB"),
        ({"tie_word_embeddings": False}, False, "5GB"),
        (MOE, True, "300KB"),
    ],
    ids=["tied, fused, in shards", "untied, apart, in one file", "experts"],
)
def test_weights_and_adapters_learn_from_fp8_tiles_as_from_the_floats_they_stand_for(
    changes, merge_qkv, max_shard_size, tmp_path
):
    runs.write_rows(tmp_path / "packed", 8)
    model = publish(tmp_path, "block_fp8", max_shard_size, **changes)
    assert (model / "model.safetensors.index.json").is_file() == (max_shard_size != "5GB")
    plain = tmp_path / "plain"
    dequantized(model, plain)
    jobs = {}
    for name, at in (("published", model), ("floats", plain)):
        codes = {"enable_qlora": name == "published"}
        for kind, lora in (("weights", {"enable_lora": False}), ("adapters", {}), ("codes", codes)):
            run = run_of(tmp_path / f"{name} {kind}", at, merge_qkv=merge_qkv, **lora)
            assert why_cannot_train(run) is None
            jobs[f"{name} {kind}"] = runs.job_of(run, tmp_path / "packed")
    [found] = on_ranks(1, each, steps, jobs)
    assert found["published codes"][2] == pytest.approx(found["floats codes"][2], rel=1e-6)
    for kind in ("weights", "adapters"):
        begun, ended, losses = found[f"published {kind}"]
        same, wanted, theirs = found[f"floats {kind}"]
        for name, value in same.items():
            assert np.array_equal(begun[name], value), name
        assert losses == theirs
        for name, value in wanted.items():
            assert np.array_equal(ended[name], value), name


@pytest.mark.parametrize(("scheme", "says"), [("block_fp8", True), ("nvfp4", False)])
def test_columns_are_cut_between_the_groups_that_are_published(scheme, says, tmp_path):
    model = publish(tmp_path, scheme)
    run = run_of(tmp_path / "out", model, enable_qlora=True)
    run = run.model_copy(update={"train": run.train.model_copy(update={"tensor_parallel_size": 4})})
    fault = "cuts the 256 columns of down_proj within groups of 128 .*as published, block_fp8"
    told = [
        misfit.reason
        for misfit in layout_errors(run, 4, ModelDims.of(read_json(model / "config.json")))
    ]
    assert any(re.search(fault, text) for text in told) == says
