"""What the settings of optimizers and precision do to a run. One process each."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.distributed.param_shards import local
from penstock.engine.optim.grad_scaler import GROWTH_INTERVAL, GradScaler
from penstock.estimate.machine import check_machine
from tests.engine import runs
from tests.engine.loops import each, loop_of, parameters_of, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

MIXED = {"enable_mixed_precision": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optim")
    runs.write_rows(folder / "packed", 8)
    runs.write_config(folder / "model")
    return folder


STEP: Any = None
"""A loss scale reads nothing of a step."""


def job(folder, out, **train):
    settings = {"data_parallel_mode": "none", "max_steps": 2, **train}
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed")


def kept(job):
    """What is computed in, and what weights, gradients and states are kept in."""
    loop = loop_of(job)
    engine = loop.built.engine
    [model] = engine.model.parts
    computed, gradients = set(), set()
    layer = model.blocks[1]
    layer.register_forward_pre_hook(lambda _, inputs: computed.add(str(inputs[0].dtype)))
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(
            str(p.grad.dtype) for p in model.parameters() if p.grad is not None
        )
    )
    step(loop)
    weights = {str(p.dtype) for p in model.parameters()}
    states = {str(s["exp_avg"].dtype) for s in engine.optimizer.state.values()}
    return [one.pop().removeprefix("torch.") for one in (computed, weights, gradients, states)]


F32, BF16, F16 = "float32", "bfloat16", "float16"
ANY = {"optimizer": "anyprecision_adamw"}
SHARDED = {"data_parallel_mode": "fsdp2"}
PRECISIONS = {
    "fp32": ({"precision": "fp32"}, [F32, F32, F32, F32]),
    "bf16_mixed": ({"precision": "bf16_mixed", **MIXED}, [BF16, F32, F32, F32]),
    "bf16": ({"precision": "bf16"}, [BF16, BF16, F32, F32]),
    "bf16, sharded": ({"precision": "bf16", **SHARDED}, [BF16, BF16, BF16, F32]),
    "fp16_mixed": ({"precision": "fp16_mixed", **MIXED}, [F16, F32, F32, F32]),
    "fp16_mixed, sharded": ({"precision": "fp16_mixed", **MIXED, **SHARDED}, [F16, F32, F32, F32]),
    "bf16 with masters": ({"precision": "bf16", "master_weights": True}, [BF16, F32, F32, F32]),
    "no masters": ({**MIXED, "master_weights": False}, [BF16, BF16, F32, F32]),
    "gradients in bf16": ({"grad_accum_dtype": "bf16"}, [F32, F32, BF16, F32]),
    "both in bf16": ({"precision": "bf16", "grad_accum_dtype": "bf16"}, [BF16, BF16, BF16, F32]),
    "states in bf16": (ANY, [F32, F32, F32, BF16]),
    "states in fp32": ({**ANY, "optimizer_dtype": "fp32"}, [F32, F32, F32, F32]),
}


def test_everything_is_computed_and_kept_in_the_precision_that_is_written(folder):
    jobs = {name: job(folder, "kept", **train) for name, (train, _) in PRECISIONS.items()}
    [found] = on_ranks(1, each, kept, jobs)
    assert found == {name: want for name, (_, want) in PRECISIONS.items()}


def after(job):
    """How far the mean weight of the embedding has moved against its gradient's sign."""
    loop = loop_of(job)
    name = "model.embed_tokens.weight"
    before = parameters_of(loop)[name]
    for local_param in loop.built.engine.model.trainable:
        local_param.parameter.grad = torch.ones_like(
            local_param.parameter, dtype=local_param.parameter.grad_dtype
        )
    for _ in range(4):
        loop.built.engine.optimizer.step()
    return float(np.mean(before - parameters_of(loop)[name]))


def test_steps_too_small_for_bf16_are_lost_unless_they_are_rounded_at_random_or_kept(folder):
    # A unit of most weights is about 2e-4.
    tiny = {"precision": "bf16", "lr": 1e-6}
    jobs = {
        "lost": job(folder, "lost", **tiny),
        "at random": job(folder, "at random", stochastic_rounding=True, **tiny),
        "muon": job(
            folder, "muon", optimizer="muon", muon_lr=1e-6, stochastic_rounding=True, **tiny
        ),
        "other seed": job(folder, "at random", stochastic_rounding=True, seed=8, **tiny),
        "kept": job(
            folder, "kept", **{**tiny, **ANY}, optimizer_kwargs={"use_kahan_summation": True}
        ),
        "exact": job(folder, "exact", lr=1e-6),
    }
    [found] = on_ranks(1, each, after, jobs)
    assert found["exact"] == pytest.approx(4e-6, rel=0.01)
    assert abs(found["lost"]) < 1e-6
    for name in ("at random", "muon", "other seed"):
        # Of 10,240 weights, each a unit off or not.
        assert found[name] == pytest.approx(4e-6, abs=2e-6), name
    assert found["at random"] != found["other seed"]


def offloaded(job):
    """Weights after two steps, and how many of the tensors that are stepped are the model's."""
    loop = loop_of(job)
    for _ in range(2):
        step(loop)
    engine = loop.built.engine
    places = {local(local_param.parameter).data_ptr() for local_param in engine.model.params}
    stepped = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert all(s.device.type == "cpu" for p in stepped for s in engine.optimizer.state[p].values())
    shared = sum(local(parameter).data_ptr() in places for parameter in stepped)
    root = job.output_dir / "checkpoints"
    checkpoints = CheckpointManager(root, loop.built.train_state, loop.ranks)
    checkpoints.save(2, {})
    again = loop_of(job)
    CheckpointManager(root, again.built.train_state, again.ranks).load(root / "global_step_2")
    assert parameters_of(again).keys() == parameters_of(loop).keys()
    again.at = loop.at
    step(again)
    step(loop)
    for name, weight in parameters_of(loop).items():
        assert np.array_equal(parameters_of(again)[name], weight), f"{name} after a checkpoint"
    return parameters_of(loop), shared


@one_day_in(2, of=1)
def test_an_optimizer_in_host_memory_steps_copies_to_the_same_bits(folder):
    kinds = {"adamw": {}, "muon": {"optimizer": "muon", **SHARDED}}
    settings = {"lr": 1e-3, "max_steps": 3}
    jobs = {
        f"{kind} {where}": job(
            folder, f"{kind} {where}", optimizer_offload=where, **settings, **one
        )
        for kind, one in kinds.items()
        for where in ("none", "cpu")
    }
    [found] = on_ranks(1, each, offloaded, jobs)
    for name in kinds:
        (here, all_here), (there, none_here) = found[f"{name} none"], found[f"{name} cpu"]
        assert all_here > 0
        assert none_here == 0
        assert all(np.array_equal(here[tensor], there[tensor]) for tensor in here), name


def fused(job):
    """Records and weights of three steps, and how many gradients were there at each update."""
    loop = loop_of(job)
    engine, there = loop.built.engine, []
    engine.optimizer.register_step_pre_hook(
        lambda *_: there.append(
            sum(one.parameter.grad is not None for one in engine.model.trainable)
        )
    )
    told = [step(loop) for _ in range(3)]
    return [(one["loss"], one["grad_norm"]) for one in told], parameters_of(loop), set(there)


@pytest.mark.slow
def test_a_fused_step_uses_one_gradient_at_a_time_and_learns_the_same(folder):
    settings = {"max_grad_norm": 0.0, "max_steps": 3, "lr": 1e-2, "weight_decay": 0.1}
    jobs = {
        f"{mode} {fuses}": job(
            folder,
            f"fused {mode} {fuses}",
            fuse_optimizer_step=fuses,
            micro_batch_size=size,
            data_parallel_mode=mode,
            **settings,
        )
        for fuses in (True, False)
        for mode, size in (("none", 4), ("fsdp2", 2))
    }
    alone = {name: made for name, made in jobs.items() if name.startswith("none")}
    sharded = {name: made for name, made in jobs.items() if name.startswith("fsdp2")}
    found = on_ranks(1, each, fused, alone)[0] | on_ranks(2, each, fused, sharded)[0]
    for mode in ("none", "fsdp2"):
        (told, weights, there), (want, exact, before) = (
            found[f"{mode} True"],
            found[f"{mode} False"],
        )
        assert there == {1}
        assert before == {len(exact) - 4}, "projections of two layers are fused"
        np.testing.assert_allclose(told, want, rtol=1e-6)
        assert all(np.array_equal(weights[name], exact[name]) for name in exact), mode


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is refused")
@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"optimizer_offload": "cpu"}, "there is no CUDA device"),
        ({"fuse_optimizer_step": True, "max_grad_norm": 0.0}, "4 is 4 micro-batches"),
        ({"optimizer": "torch.optim.Nadam"}, r"Did you mean torch\.optim\.NAdam\?"),
        (
            {"optimizer": "torch.optim.RAdam", "optimizer_kwargs": {"eta": 1}},
            "has no such argument",
        ),
    ],
)
def test_what_this_machine_cannot_step_is_refused(folder, train, says):
    with pytest.raises((CapabilityError, ConfigError), match=says):
        check_machine(job(folder, "machine", **train).config)


def rates(job):
    loop = loop_of(job)
    name_of = {id(one.parameter): one.name for one in loop.built.engine.model.params}
    return {
        name_of[id(parameter)]: group["lr"]
        for group in loop.built.engine.optimizer.param_groups
        for parameter in group["params"]
    }


def test_layers_learn_as_fast_as_their_depth_says(folder):
    made = job(folder, "depth", lr=1.0, layerwise_lr_decay_bound=0.2)
    [found] = on_ranks(1, rates, made)
    # Two layers, so four even steps from 0.2 to 1; the second layer is one of them up.
    assert found["model.embed_tokens.weight"] == pytest.approx(0.2)
    assert found["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.2)
    assert found["model.layers.1.mlp.up_proj.weight"] == pytest.approx(0.4)
    assert found["model.norm.weight"] == pytest.approx(1.0)


def scaled(job):
    """Records of some steps, and the weights after each."""
    loop, found = loop_of(job), []
    for _ in range(3):
        found.append((step(loop), parameters_of(loop)))
    scaler = loop.built.engine.part(GradScaler)
    return found, scaler and scaler.as_json()


def test_a_step_that_overflows_is_left_out_and_the_scale_halved(folder):
    in_fp16 = {"precision": "fp16_mixed", **MIXED, "lr": 1e-3, "max_steps": 3}
    jobs = {
        # In float16 everything beyond 65,504 is infinite.
        "too much": job(folder, "much", loss_scale_init=2.0**40, **in_fp16),
        "as it is": job(folder, "begins", **in_fp16),
        "fp32": job(folder, "plain", precision="fp32", lr=1e-3, max_steps=3),
    }
    [found] = on_ranks(1, each, scaled, jobs)
    records, kept = found["too much"]
    assert [record["loss_scale"] for record, _ in records] == [2.0**40, 2.0**39, 2.0**38]
    assert all(record["skipped"] for record, _ in records)
    assert kept == {"scale": 2.0**37, "quiet": 0}
    first, last = records[0][1], records[2][1]
    assert all(np.array_equal(first[name], last[name]) for name in first)
    records, kept = found["as it is"]
    assert kept == {"scale": 65536.0, "quiet": 3}
    for (mine, weights), (theirs, exact) in zip(records, found["fp32"][0], strict=True):
        assert not mine["skipped"]
        # Ten bits of a mantissa.
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
        for name, weight in exact.items():
            assert np.abs(weights[name] - weight).mean() < 2e-4, name


def test_a_scale_grows_after_a_while_without_overflows_and_does_not_shrink_to_nothing():
    scale = GradScaler(4.0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.after_update(STEP)
    assert scale.scale == 4.0
    scale.after_update(STEP)
    assert scale.as_json() == {"scale": 8.0, "quiet": 0}
    assert [scale.skips_update(STEP) for _ in range(4)] == [True, True, True, False]


def test_a_scale_counts_quiet_steps_from_the_last_overflow():
    scale = GradScaler(4.0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.after_update(STEP)
    assert scale.skips_update(STEP)
    scale.after_update(STEP)
    assert scale.as_json() == {"scale": 2.0, "quiet": 1}


@pytest.mark.parametrize("overflows", [(), (5,), (GROWTH_INTERVAL - 1,)])
def test_a_scale_grows_at_the_same_step_from_wherever_a_run_goes_on(overflows):
    def scales(first, start, end):
        scale, found = first, []
        for number in range(start, end):
            if number in overflows:
                scale.skips_update(STEP)
            else:
                scale.after_update(STEP)
            found.append(scale.scale)
        return scale, found

    last = 2 * GROWTH_INTERVAL + 9
    _, whole = scales(GradScaler(4.0), 0, last)
    for stop in (1, 6, GROWTH_INTERVAL - 1, GROWTH_INTERVAL, GROWTH_INTERVAL + 500):
        before, found = scales(GradScaler(4.0), 0, stop)
        again = GradScaler(4.0)
        again.restore(json.loads(json.dumps(before.as_json())))
        assert found + scales(again, stop, last)[1] == whole
    assert len(set(whole)) > 1


def overflowing_once(job):
    """The records of a step that overflows and of the next one, which does not, and whether the
    weights are finite and others then."""
    loop = loop_of(job)
    first, before = step(loop), parameters_of(loop)
    scaling = loop.built.engine.part(GradScaler)
    assert scaling is not None
    scaling.scale = 1024.0
    second, after = step(loop), parameters_of(loop)
    moved = any(not np.array_equal(before[name], after[name]) for name in before)
    return first, second, moved and all(np.isfinite(each).all() for each in after.values())


def test_gradients_that_overflowed_are_no_part_of_the_next_step(folder):
    made = job(
        folder, "once", precision="fp16_mixed", **MIXED, loss_scale_init=2.0**40, max_steps=2
    )
    [(first, second, moved)] = on_ranks(1, overflowing_once, made)
    assert first["skipped"]
    assert not second["skipped"]
    assert second["grad_norm"] > 0
    assert moved


def resumed(job):
    assert runs.train_here(job)
    last = job.output_dir / "checkpoints" / "global_step_2"
    return json.loads((last / "state.json").read_text()), loop_after(job)


def loop_after(job):
    loop = loop_of(job)
    loop._resume()
    scaling = loop.built.engine.part(GradScaler)
    assert scaling is not None
    return scaling.as_json()


@pytest.mark.slow
def test_a_scale_goes_on_where_it_was(folder):
    made = job(folder, "scale", precision="fp16_mixed", **MIXED, loss_scale_init=2.0**40, lr=1e-3)
    [(state, again)] = on_ranks(1, resumed, made)
    assert state["loss_scale"] == again == {"scale": 2.0**38, "quiet": 0}
