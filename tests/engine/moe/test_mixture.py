"""Models with experts, sharded over ranks: read, computed, saved and exported; and their fields."""

import shutil
from importlib import metadata

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from penstock.core.errors import CapabilityError
from penstock.engine.backends.select_experts import select_moe_backend
from penstock.engine.build import build_empty
from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.distributed.data_parallel import shard_units
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.save_model import write_weights
from penstock.engine.hf.state_dict import in_checkpoint, in_source
from penstock.models.decoder import Decoder, PipelineStageModules
from penstock.models.layers.experts import select_expert_ops
from penstock.models.registry import get_family
from penstock.pipeline.plan import check_machine
from penstock_kernels.attention import attention
from penstock_kernels.group_gemm.native import PRODUCTS
from tests.engine import runs
from tests.engine.loops import (
    before_each_update,
    decoder_of,
    each,
    gradients_of,
    loop_of,
    parameters_of,
    step,
)
from tests.models.twins import ALIKE, SPARSE, documents, hf_model, marked, their_logits
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

FAMILIES = [family for family in SPARSE if family not in ALIKE]
REST = [family for family in SPARSE if family in ALIKE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    runs.write_rows(folder / "packed", 4)
    for family in SPARSE:
        # Of Mixtral's five experts, each with three tensors, no two ranks hold as many.
        hf_model(family, tied=False, vocab_size=runs.VOCAB).save_pretrained(folder / family)
    return folder


def job(folder, out, family, **train):
    model = {"model_path": str(folder / family), **train.pop("model", {})}
    settings = {"data_parallel_mode": "fsdp2", "max_steps": 1, "max_grad_norm": 0, **train}
    run = runs.run_config(folder / out, folder / family, model=model, **settings)
    return runs.job_of(run, folder / "packed")


def read_saved_and_computed(job):
    """What was read, which is saved as well, and the gradients of a step."""
    loop = loop_of(job)
    CheckpointManager(job.output_dir, loop.built.train_state, init_process_group(60)).save(
        0, {"step": 0}
    )
    read = parameters_of(loop)
    seen = before_each_update(loop, lambda: gradients_of(loop))
    step(loop)
    return read, seen[0]


@one_day_in(3, of=2)
@pytest.mark.parametrize(
    "families",
    [FAMILIES[::2], pytest.param([*FAMILIES[1::2], *REST], marks=pytest.mark.exhaustive)],
)
def test_experts_over_two_ranks_are_read_computed_and_exported_as_by_one(folder, families):
    def jobs(out, **train):
        return {family: job(folder, f"{out} {family}", family, **train) for family in families}

    [alone] = on_ranks(1, each, read_saved_and_computed, jobs("one", data_parallel_mode="none"))
    both, _ = on_ranks(2, each, read_saved_and_computed, jobs("two"), timeout=180)
    for family in families:
        stored = load_file(folder / family / "model.safetensors")
        read, gradients = both[family]
        assert read.keys() == stored.keys()
        for name, tensor in stored.items():
            assert np.array_equal(read[name], tensor.numpy()), name
        wanted = alone[family][1]
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            error = np.linalg.norm(gradients[name] - gradient)
            assert error <= 1e-5 * np.linalg.norm(gradient), name
        names = get_family({"model_type": family}).weight_map(config_of(folder, family))
        reader = CheckpointReader(folder / f"two {family}" / "global_step_0")
        out = folder / f"out {family}"
        write_weights(in_checkpoint(reader, names), out, dtype=torch.float32, max_shard_size="1GB")
        assert all(
            torch.equal(t, stored[n]) for n, t in load_file(out / "model.safetensors").items()
        )
        shutil.copy(folder / family / "config.json", out)
        document = documents()[0][2]
        with torch.no_grad():
            before, after = (
                their_logits(AutoModelForCausalLM.from_pretrained(place), document)
                for place in (folder / family, out)
            )
        assert torch.equal(before, after)


@pytest.mark.parametrize("family", marked(SPARSE))
def test_in_bf16_what_decides_between_experts_is_exported_in_fp32(folder, family, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    names = get_family({"model_type": family}).weight_map(config_of(folder, family))
    stored = load_file(folder / family / "model.safetensors")
    with SafetensorsFolder(folder / family) as opened:
        write_weights(
            in_source(opened, names), tmp_path / "ours", dtype=torch.bfloat16, max_shard_size="1GB"
        )
    theirs, ours = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    if family == "minimax_m2":  # of which transformers rounds the bias
        theirs |= {n: t for n, t in stored.items() if n.endswith("e_score_correction_bias")}
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(ours[name], theirs[name]) for name in stored)


def config_of(folder, family):
    hf_config = read_hf_config(str(folder / family), {})
    return get_family(hf_config).read(hf_config)


class Grouped(TorchFunctionMode):
    """Counts calls of PyTorch's grouped product."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.calls += function is PRODUCTS.by_rows
        return function(*arguments, **(options or {}))


def watched(job):
    """Grouped products and the dtypes of routers' weights in a step, and routers' gradients."""
    loop = loop_of(job)
    dtypes = set()
    for router in decoder_of(loop).routers().values():
        router.register_forward_hook(lambda router, *_: dtypes.add(str(router.weight.dtype)))
    seen = before_each_update(loop, lambda: list(gradients_of(loop)))
    with Grouped() as grouped:
        step(loop)
    return grouped.calls, dtypes, {name for name in seen[0] if "mlp.gate.weight" in name}


@pytest.mark.slow
def test_experts_and_routers_are_computed_as_is_written(folder):
    mixed = {"enable_mixed_precision": True}
    jobs = {
        name: job(folder, name, "qwen3_moe", model=model, **mixed)
        for name, model in {
            "unset": {},
            "eager": {"moe_implementation": "eager"},
            "native": {"moe_implementation": "native"},
            "rounded": {"router_fp32": False},
            "frozen": {"freeze_router": True},
            "new": {"model_path": None, "config_path": "builtin:tiny-qwen3-moe"},
        }.items()
    }
    jobs["whole"] = job(folder, "whole", "qwen3_moe", data_parallel_mode="none", **mixed)
    [found] = on_ranks(1, each, watched, jobs)
    calls = {name: result[0] for name, result in found.items()}
    assert calls["eager"] == 0
    assert calls["native"] == calls["unset"] == calls["whole"] > 0
    assert found["unset"][1] == {"torch.float32"}
    assert found["rounded"][1] == {"torch.bfloat16"}
    assert found["frozen"][2] == set()
    assert len(found["unset"][2]) == 2
    assert len(found["new"][2]) == 3


def factors(job):
    """The shapes of one layer's factors, by the last parts of their names."""
    experts = select_expert_ops("eager")
    family = get_family(hf_config := read_hf_config(job.config_path, {}))
    config = family.read(hf_config)
    base = BaseModelWeights(family.weight_map(config), None, hf_config, family.roles, None)
    model = build_empty(job.config, family, base, PipelineStageModules([2]), attention, experts)
    return {
        name.rpartition(".mlp.")[2]: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".mlp." in name and parameter.requires_grad
    }


def test_experts_share_the_factors_that_are_written(folder):
    lora = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": ["down_proj"]}
    found = [
        factors(job(folder, "factors", "qwen3_moe", lora={**lora, **more}))
        for more in ({}, {"moe_shared_lora": True}, {"moe_hybrid_shared_lora": True})
    ]
    own, shared = "experts.adapter.lora_{}.down_proj", "adapter.lora_{}.down_proj"
    assert found == [
        {own.format("A"): (8, 4, 24), own.format("B"): (8, 48, 4)},
        {shared.format("A"): (4, 24), shared.format("B"): (48, 4)},
        {own.format("A"): (8, 4, 24), shared.format("B"): (48, 4)},
    ]


def test_a_part_without_experts_knows_what_they_are_called_elsewhere(folder):
    config = config_of(folder, "glm4_moe")
    with torch.device("meta"):
        first, second = (Decoder(config, part=PipelineStageModules([layer])) for layer in (0, 1))
    assert shard_units(first, ["Experts"]) == list(first.model.layers.values())
    assert len(shard_units(second, ["Experts"])) == 2


def chosen(folder, family, implementation, **foundation):
    made = job(folder, "chosen", family, model={"moe_implementation": implementation})
    hf_config = {**read_hf_config(str(folder / family), {}), **foundation}
    said = []
    config = get_family(hf_config).read(hf_config)
    return select_moe_backend(made.config, config, torch.device("cpu"), said.append), said


def test_experts_that_a_backend_does_not_take_are_refused_or_computed_by_another(folder):
    assert chosen(folder, "qwen3_moe", None)[1] == ["experts: native"]
    assert chosen(folder, "qwen3_moe", None, moe_intermediate_size=7)[1] == ["experts: eager"]
    with pytest.raises(CapabilityError, match=r"moe_implementation is native.*multiples of 4"):
        chosen(folder, "qwen3_moe", "native", moe_intermediate_size=7)
    with pytest.raises(CapabilityError, match="moe_implementation is quack"):
        chosen(folder, "qwen3_moe", "quack")
    _, said = chosen(folder, "qwen3_moe", "native", mlp_only_layers=[0, 1, 2])
    assert said == ["experts: the model has none, so moe_implementation native changes nothing"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is refused")
@pytest.mark.parametrize("implementation", ["triton", "quack"])
def test_kernels_for_gpus_are_refused_before_anything_starts(folder, implementation):
    made = job(folder, "gpus", "qwen3_moe", model={"moe_implementation": implementation})
    with pytest.raises(CapabilityError, match=f"{implementation}, which needs a CUDA device"):
        check_machine(made.config)


def test_quack_without_its_package_is_refused_before_anything_starts(folder, monkeypatch):
    monkeypatch.setattr("penstock.core.env.num_gpus", lambda: 1)
    monkeypatch.setattr(
        "penstock.estimate.machine.version", lambda name: metadata.version(f"no-{name}")
    )
    made = job(folder, "quack", "qwen3_moe", model={"moe_implementation": "quack"})
    with pytest.raises(
        CapabilityError, match=r"quack-kernels is not installed.*\n.*penstock\[quack"
    ):
        check_machine(made.config)
