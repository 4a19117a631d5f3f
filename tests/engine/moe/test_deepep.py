"""Tokens sent by DeepEP's calls: what becomes of its settings, of numbers, and where it is not."""

import sys
from contextlib import nullcontext

import numpy as np
import pytest

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.machine.gpus import Gpus, any_linked, highest_capability
from penstock.engine.moe.deepep_requirements import require_nvlink, require_one_machine
from penstock.estimate.machine import check_machine
from tests.engine import runs
from tests.engine.loops import before_each_update, decoder_of, each, gradients_of, loop_of, step
from tests.engine.moe import deep_ep_stand_in
from tests.models.twins import hf_model
from tests.ranks import on_ranks

FULL = {"enable_mixed_precision": False}
SHARED = "glm4_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepep")
    runs.write_rows(folder / "packed", 4)
    hf_model(SHARED, tied=False, vocab_size=runs.VOCAB).save_pretrained(folder / "model")
    return folder


def config(folder, out, *, model=None, **train):
    settings = {
        "expert_parallel_size": 2,
        "enable_mixed_precision": True,
        "max_steps": 1,
        "max_grad_norm": 0,
        **train,
    }
    model = {"model_path": str(folder / "model"), **(model or {})}
    return runs.run_config(folder / out, folder / "model", model=model, **settings)


def job(folder, out, **settings):
    """In fp32, which DeepEP itself does not take: so sums can be compared."""
    run = config(folder, out, **settings)
    train = run.train.model_copy(update=FULL)
    return runs.job_of(run.model_copy(update={"train": train}), folder / "packed")


def watched(job):
    """The gradients of a step, the buffer and what was asked of it, in order."""
    deep_ep_stand_in.Buffer.last = None
    loop = loop_of(job)
    buffer = deep_ep_stand_in.Buffer.last
    log = buffer.log if buffer else []
    for layer in decoder_of(loop).model.layers.values():
        if shared := getattr(layer.mlp, "shared_experts", None):
            shared.register_forward_hook(lambda *_: log.append("shared"))
            shared.register_full_backward_hook(lambda *_: log.append("shared"))
    seen = before_each_update(loop, lambda: gradients_of(loop))
    loss = step(loop)["loss"]
    made = buffer and (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.num_sms)
    return loss, seen[0], made, log


def watch(jobs, too_small):
    sys.modules["deep_ep"] = deep_ep_stand_in
    with pytest.raises(ConfigError) as refusal:
        loop_of(too_small)
    return each(watched, jobs), str(refusal.value)


DEEPEP = {"ep_dispatch": "deepep", "deepep_num_sms": 24, "deepep_buffer_size_gb": 0.5}
MEANWHILE = {**DEEPEP, "deepep_async_combine": True}


@pytest.mark.dist
@pytest.mark.slow
def test_settings_reach_deepep_and_change_no_number(folder):
    kept = {"enable_gradient_checkpointing": False}
    jobs = {
        "alltoall": job(folder, "alltoall", **kept),
        "deepep": job(folder, "deepep", model=DEEPEP, **kept),
        "meanwhile": job(folder, "meanwhile", model=MEANWHILE, **kept),
        "again": job(folder, "again", model=MEANWHILE),
        "acts": job(folder, "acts", model=MEANWHILE, moe_checkpoint_method="moe_act"),
    }
    small = job(folder, "small", model={**DEEPEP, "deepep_buffer_size_gb": 0.001})
    for found, refusal in on_ranks(2, watch, jobs, small):
        # 10 kB for each of 24 multiprocessors, 2 ranks and the 96 bytes of a token.
        assert "need 0.046" in refusal
        assert "Write model.deepep_buffer_size_gb: 0.05" in refusal
        loss, gradients, *_ = found.pop("alltoall")
        for name, (its_loss, its_gradients, made, _) in found.items():
            assert made == (500_000_000 // 128 * 128, 0, 24), name
            assert its_loss == pytest.approx(loss, rel=1e-6), name
            assert its_gradients.keys() == gradients.keys()
            for tensor, gradient in gradients.items():
                error = np.linalg.norm(its_gradients[tensor] - gradient)
                assert error <= 1e-5 * np.linalg.norm(gradient), f"{name} {tensor}"
        # Of a rank's two micro-batches; two layers have experts.
        layer = ["dispatch", "combine", "shared"]
        assert found["deepep"][3] == 2 * (2 * layer + 2 * ["shared", "dispatch", "combine"])
        # Shared experts are computed while tokens travel, in both directions.
        forward = ["dispatch", "combine", "shared", "wait"]
        backward = ["dispatch", "shared", "wait", "combine"]
        assert found["meanwhile"][3] == 2 * (2 * forward + 2 * backward)
        # Tokens are sent there and back once more by full recomputation, and not by that of gates.
        sent = {name: log.count("dispatch") for name, (*_, log) in found.items()}
        assert sent["again"] == sent["meanwhile"] + 4
        assert sent["acts"] == sent["meanwhile"]


MATRIX = """ \tGPU0\tGPU1\t
 GPU0\tX\t{0}\t
 GPU1\t{0}\tX\t

Legend:
  OK   = Status Ok
  NS   = Not supported
"""


def test_what_the_drivers_tool_says_of_gpus_is_understood():
    assert any_linked(MATRIX.format("OK")) is True
    assert any_linked(MATRIX.format("NS")) is False
    assert any_linked("Invalid argument") is None
    assert any_linked(None) is None
    assert highest_capability("8.0\n12.1\n9.0\n") == (12, 1)
    assert highest_capability("Field is not valid") is None


HOPPERS = Gpus(8, (9, 0), has_nvlink=True)

# GPUs, whether the package is there, and words of the refusal.
REFUSED = {
    "no gpus": (Gpus(0), True, "needs CUDA devices, and there is none"),
    "no package": (HOPPERS, False, "the package deep_ep is not installed"),
    "too old": (Gpus(8, (8, 0), has_nvlink=True), True, "9.0 or later, and these have 8.0"),
    "not linked": (
        Gpus(8, (9, 0), has_nvlink=False),
        True,
        "are connected by NVLink",
    ),
}


def deepep_run(folder, **train):
    return config(folder, "wanted", model={"ep_dispatch": "deepep"}, **train)


@pytest.mark.parametrize("case", REFUSED)
def test_what_deepep_lacks_is_told_before_anything_starts(case, folder, monkeypatch):
    gpus, there, words = REFUSED[case]
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep_stand_in if there else None)
    with pytest.raises(CapabilityError, match=words) as refusal:
        require_nvlink(deepep_run(folder), gpus)
    assert "Write model.ep_dispatch: alltoall" in str(refusal.value)


def test_deepep_is_let_through_where_it_can_be(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep_stand_in)
    for gpus in (HOPPERS, Gpus(8)):
        require_nvlink(deepep_run(folder), gpus)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({}, None),
        # Each machine is a stage of its own, within which no rank is far.
        ({"ep_outside": True, "pipeline_parallel_size": 2}, None),
        ({"ep_outside": True}, "shared by ranks 0, 8, which are on 2 machines of 8 processes"),
    ],
)
def test_experts_shared_between_machines_refuse_deepep(train, told, folder):
    refuses = pytest.raises(CapabilityError, match=told) if told else nullcontext()
    with refuses:
        require_one_machine(deepep_run(folder, **train), 16, 8)


def test_a_machine_without_gpus_refuses_deepep(folder, monkeypatch):
    monkeypatch.setattr("penstock.core.env.num_gpus", lambda: 0)
    with pytest.raises(CapabilityError, match="ep_dispatch is deepep, which needs CUDA devices"):
        check_machine(deepep_run(folder))
