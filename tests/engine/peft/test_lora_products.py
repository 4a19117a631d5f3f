"""How a layout computes the products of adapters, which changes no result."""

import numpy as np
import pytest

from penstock.adapters.lora import LoraLinear
from tests.engine import runs
from tests.engine.inputs import write_bases
from tests.engine.loops import decoder_of, each, loop_of, parameters_of, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

RUNS = {
    "adamw": {"optimizer": "adamw"},
    "recomputed": {"enable_gradient_checkpointing": True},
    "anyprecision": {"optimizer": "anyprecision_adamw"},
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
    "in backward": {"fuse_optimizer_step": True, "max_grad_norm": 0},
    "on the host": {"optimizer_offload": "cpu"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("products")
    runs.write_rows(folder / "packed", 16)
    write_bases(folder)
    return folder


def job_of(folder, name, qlora=False, **train):
    settings = {
        "data_parallel_mode": "none",
        "enable_mixed_precision": True,
        "enable_gradient_checkpointing": False,
        "max_steps": 3,
        **train,
    }
    model = {"model_path": str(folder / "dense"), "tokenizer_path": "builtin:bytes"}
    lora = {"enable_lora": True, "lora_rank": 4, "enable_qlora": qlora}
    run = runs.run_config(folder / name, folder / "dense", model=model, lora=lora, **settings)
    return runs.job_of(run, folder / "packed")


def trained(job, change=None):
    """The parameters after three steps, with a change of every adapted layer."""
    loop = loop_of(job)
    layers = [m for m in decoder_of(loop).modules() if isinstance(m, LoraLinear)]
    assert layers
    if change is not None:
        for layer in layers:
            change(layer)
    for _ in range(3):
        step(loop)
    return parameters_of(loop)


def with_and_without_copies(job):
    def without(layer):
        assert layer.copies is not None
        layer.copies = None

    return trained(job), trained(job, without)


def one_by_one(layer):
    layer.is_fusable = False


def jointly_and_one_by_one(job):
    return trained(job), trained(job, one_by_one)


def test_copies_of_matrices_are_those_of_the_last_update_whatever_the_optimizer_is(folder):
    jobs = {name: job_of(folder, name, **train) for name, train in RUNS.items()}
    [found] = on_ranks(1, each, with_and_without_copies, jobs)
    for name, (got, want) in found.items():
        assert got.keys() == want.keys()
        for tensor, value in got.items():
            assert np.array_equal(value, want[tensor]), (name, tensor)


def test_runs_learn_the_same_with_products_in_one_node_and_one_by_one(folder):
    precise = {"enable_mixed_precision": False, "optimizer": "sgd"}
    forms = {
        "none": precise,
        "recomputed": {**precise, "enable_gradient_checkpointing": True},
        "fsdp": {**precise, "data_parallel_mode": "fsdp2", "enable_gradient_checkpointing": True},
        "reentrant": {**precise, "enable_gradient_checkpointing": True, "enable_reentrant": True},
        "qlora": {**precise, "qlora": True},
    }
    jobs = {name: job_of(folder, f"same {name}", **train) for name, train in forms.items()}
    [found] = on_ranks(1, each, jointly_and_one_by_one, jobs)
    for name, (got, want) in found.items():
        moved = [tensor for tensor in got if ".lora_B." in tensor]
        assert moved, name
        for tensor in moved:
            assert np.abs(got[tensor]).max() > 1e-4, (name, tensor)
            np.testing.assert_allclose(got[tensor], want[tensor], rtol=1e-4, atol=1e-6)
