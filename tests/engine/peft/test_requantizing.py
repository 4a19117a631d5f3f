"""Adapters that become part of quantized weights: whatever the layout, the codes are those of whole
matrices that are dequantized, added to and quantized in one place."""

import zlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.adapters.names import parse_lora_name
from penstock.core.errors import StageError
from penstock.engine.distributed.param_shards import local
from penstock.engine.hf.export import write_folders
from penstock.engine.hf.load_weights import copy_shard
from penstock.engine.model_source import ExportFormat
from penstock.engine.peft.relora import ReLoRA
from penstock.engine.quantization import requantize
from penstock.pipeline.origins import resolve_model_source
from penstock.train.launch.job import Job
from penstock_kernels.quant import FORMATS, QuantizedTensor, dequantize, quantize
from tests.engine import runs
from tests.engine.inputs import MODELS
from tests.engine.laid import SHORT
from tests.engine.loops import each, loop_of, parameters_of, save
from tests.engine.peft.test_merging import merged_by_hand
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

ALPHA, RANK = 3, 4
LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A fused matrix bears two adapters of three."""

BASES = {
    # Tiles are cut by rows at 100 of 200 and at 64 of 256; columns, 256, at 128.
    "dense": {"hidden_size": 200, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1},
    "experts": {**MODELS["experts"], "intermediate_size": 64},
}
FORMS = {
    "nf4": ("dense", FORMATS["nf4"], FORMATS["nf4"]),
    "nvfp4": ("dense", FORMATS["nvfp4"], FORMATS["nvfp4"]),
    "block_fp8": ("dense", FORMATS["block_fp8"], FORMATS["block_fp8"]),
    "int8": ("dense", FORMATS["int8"], FORMATS["int8"]),
    "int8_int4_experts": ("experts", FORMATS["int8"], FORMATS["int4"]),
    "nvfp4 of experts": ("experts", FORMATS["nvfp4"], FORMATS["nvfp4"]),
}
"""A base, and what linear layers and experts are kept in."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requantizing")
    runs.write_rows(folder / "packed", 8)
    for name, changes in BASES.items():
        config = transformers.AutoConfig.for_model(
            **{**runs.TINY, "tie_word_embeddings": False, **changes}
        )
        config.dtype = torch.float32
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


def job_of(folder, form, layout="alone", **settings):
    base = folder / FORMS[form][0]
    lora = {
        "enable_lora": True,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_target_modules": LINEAR,
        "enable_qlora": True,
        "quant_format": form.partition(" ")[0],
        "merge_lora_interval": 1,
    }
    axes = {SHORT[axis]: settings.pop(axis) for axis in SHORT if axis in settings}
    settings = {"data_parallel_mode": "fsdp2" if axes else "none", **axes, **settings}
    model = {"model_path": str(base), "tokenizer_path": "builtin:bytes"}
    run = runs.run_config(folder / layout / form, base, model=model, lora=lora, **settings)
    return runs.job_of(run, folder / "packed")


def factor(name, shape):
    """The very same numbers wherever rows of a factor lie."""
    numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.1 * torch.randn(shape, generator=numbers)


def merged(job, spoilt=""):
    """All parameters after a merge of factors that are written by hand, on the first rank; of one
    that is alone with a checkpoint. The factor `spoilt` has an infinite number in its first row."""
    loop = loop_of(job)
    engine = loop.built.engine
    if loop.ranks.world_size > 1:
        # What one process does in one go ends within tiles here.
        requantize.STRETCH = 37 * 4 * 200
    for local_param in engine.model.params:
        for piece in local_param.shards if parse_lora_name(local_param.name) else ():
            whole = factor(piece.tensor, piece.full_shape)
            if piece.tensor == spoilt:
                whole[0] = float("inf")
            copy_shard(whole, piece, piece.view(local(local_param.parameter).detach()))
    relora = engine.part(ReLoRA)
    assert relora
    relora.merge(1)
    if loop.ranks.world_size == 1:
        save(loop)
    found = parameters_of(loop)
    return found if loop.ranks.is_main_process else None


def bytes_of(quantized):
    return {leaf: raw.numpy() for leaf, raw in quantized.as_bytes().items()}


@pytest.fixture(scope="module")
def one_process(folder):
    """What one process makes of every form."""
    [found] = on_ranks(1, each, merged, {form: job_of(folder, form) for form in FORMS})
    return found


def test_one_process_quantizes_what_it_dequantized_and_added_to(folder, one_process):
    for form, (base, linear, of_experts) in FORMS.items():
        found = one_process[form]
        weights = load_file(folder / base / "model.safetensors")
        kept = {
            name: quantize(tensor, of_experts if ".experts." in name else linear)
            for name, tensor in weights.items()
            if f"{name}.codes" in found
        }
        before = {name: dequantize(value, torch.float32).numpy() for name, value in kept.items()}
        factors = {n: factor(n, a.shape).numpy() for n, a in found.items() if parse_lora_name(n)}
        after = merged_by_hand({**before, **factors}, ALPHA / RANK)
        assert len(kept) == (7 if base == "dense" else 2 * 4 + 3 * 8 + 3)
        for name, value in kept.items():
            if not np.array_equal(after[name], before[name]):
                value = quantize(torch.tensor(after[name]).float(), value.format)
                assert not np.array_equal(bytes_of(value)["codes"], bytes_of(kept[name])["codes"])
            else:
                assert "k_proj" in name
            for leaf, raw in bytes_of(value).items():
                assert np.array_equal(found[f"{name}.{leaf}"], raw), f"{form}: {name}.{leaf}"


def test_what_was_merged_is_exported(folder, one_process):
    form = "int8_int4_experts"
    _, linear, of_experts = FORMS[form]
    job = job_of(folder, form)
    last = job.output_dir / "checkpoints" / "global_step_0"
    write_folders(
        last, resolve_model_source(job.config), ExportFormat(), out := job.output_dir / "exported"
    )
    files = load_file(out / "hf" / "model.safetensors")
    for name, tensor in files.items():
        found = {
            leaf: torch.tensor(one_process[form][f"{name}.{leaf}"]).to(torch.uint8)
            for leaf in ("codes", "scales")
            if f"{name}.codes" in one_process[form]
        }
        if found:
            kept = of_experts if ".experts." in name else linear
            want = dequantize(QuantizedTensor.of_bytes(kept, tensor.shape[1], found), torch.float32)
        else:
            want = torch.tensor(one_process[form][name])
        # Factors have begun anew: their product is zero.
        assert torch.equal(tensor, want), name


EP: dict[str, Any] = {"expert_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "shard 2": (2, {"shard": 2}, ("nvfp4", "block_fp8")),
    "tp 2": (2, {"tp": 2}, ("block_fp8", "int8")),
    "ep 2": (2, {"shard": 2, **EP}, ("nvfp4 of experts",)),
    "offloaded": (4, {"shard": 2, "tp": 2, "enable_fsdp_offload": True}, ("nf4", "block_fp8")),
    "shard 2 x tp 2": (4, {"shard": 2, "tp": 2}, ("nvfp4", "int8")),
    "ep 2 over shard 2 x tp 2": (4, {"shard": 2, "tp": 2, **EP}, ("int8_int4_experts",)),
}


def spoilt(job):
    """What is said of a number that is not finite, of rows that one rank has."""
    with pytest.raises(StageError) as error:
        merged(job, "model.layers.0.self_attn.o_proj.lora_B.o_proj")
    return str(error.value)


def resumed(job):
    """All parameters of a run that goes on from a checkpoint of one process, on the first rank."""
    loop = loop_of(job)
    loop._resume()
    found = parameters_of(loop)
    return found if loop.ranks.is_main_process else None


def all_of(good, bad, others):
    """What is merged, what is said where that cannot be, and what is read."""
    return each(merged, good), each(spoilt, bad), each(resumed, others)


def jobs_of(folder, world):
    """Of every layout over so many ranks."""
    return {
        (layout, form): job_of(folder, form, layout, **settings)
        for layout, (size, settings, forms) in LAYOUTS.items()
        for form in forms
        if size == world
    }


@pytest.fixture(scope="module")
def two_ranks(folder, one_process):
    """What each of two ranks makes of the layouts over two, what it says of spoilt factors, and
    what it reads of what one process saved."""
    bad = {form: job_of(folder, form, "spoilt", shard=2) for form in ("nf4", "nvfp4")}
    others: dict[tuple[str, str], Job] = {}
    for form in one_process.keys() & {"block_fp8", "nvfp4 of experts"}:
        saved = folder / "alone" / form / "checkpoints" / "global_step_0"
        job = job_of(folder, form, "resumed", load_checkpoint_path=str(saved), tp=2)
        others["resumed", form] = job
    return on_ranks(2, all_of, jobs_of(folder, 2), bad, others, timeout=120)


@one_day_in(2, of=0)
def test_two_ranks_write_the_codes_of_one(two_ranks, one_process):
    require_same(two_ranks[0][0], one_process)


@pytest.mark.slow
def test_two_ranks_go_on_with_the_codes_of_one(two_ranks, one_process):
    require_same(two_ranks[0][2], one_process)


@pytest.mark.exhaustive
def test_four_ranks_write_the_codes_of_one(folder, one_process):
    require_same(
        on_ranks(4, each, merged, jobs_of(folder, 4), timeout=120)[0],
        one_process,
    )


def require_same(found, one_process):
    for (layout, form), arrays in found.items():
        want = one_process[form]
        assert arrays.keys() == want.keys()
        for name, array in want.items():
            assert np.array_equal(arrays[name], array), f"{form}, {layout}: {name}"


@pytest.mark.slow
def test_all_ranks_refuse_numbers_that_are_not_finite_on_one(two_ranks):
    for _, said, _ in two_ranks:
        assert len(said) == 2
        for text in said.values():
            assert "after step 1" in text
            assert "model.layers.0.self_attn.o_proj.weight" in text
            assert "the last checkpoint is intact" in text
