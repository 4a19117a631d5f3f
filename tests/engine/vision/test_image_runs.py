"""Settings of runs on images: resuming, precision, memory, schedules of pipelines, optimizers."""

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.engine.vision.build import checked_vision
from penstock.models.registry import get_family
from penstock.models.vision.types import is_vision
from tests.engine import runs
from tests.engine.loops import calls_of, decoder_of, loop_of
from tests.engine.vision.steps import (
    NUMBERS,
    each_steps,
    image_job,
    loaded,
    steps,
    steps_of,
    write_model,
)
from tests.models.images import image_model
from tests.ranks import on_ranks

ALONE = {"data_parallel_mode": "none"}


def written(folder, model_type="qwen2_5_vl"):
    write_model(folder / model_type, model_type)
    runs.write_rows(folder / "packed", 4)
    return model_type


def assert_same(found, wanted, limit=2e-5):
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["weights"].keys() == wanted["weights"].keys()
    norm = max(np.linalg.norm(value) for value in wanted["weights"].values())
    for name, value in wanted["weights"].items():
        error = np.linalg.norm(found["weights"][name] - value)
        assert error <= limit * np.linalg.norm(value) + 1e-7 * norm, name


@pytest.mark.dist
@pytest.mark.exhaustive
def test_a_run_that_resumes_in_another_layout_ends_as_one_that_did_not_stop(tmp_path):
    model_type = written(tmp_path)
    freeze = {"model": {"freeze": ["projector"]}}
    [whole] = on_ranks(1, steps, image_job(tmp_path, "whole", model_type, **freeze, **ALONE))
    how = {"data_parallel_shard_size": 2, "save_steps": 1}
    on_ranks(2, steps, image_job(tmp_path, "cut", model_type, **freeze, **how), 1, True)
    rest = image_job(tmp_path, "cut", model_type, **freeze, **ALONE)
    [found] = on_ranks(1, steps, rest, 1, False, True)
    assert_same({**found, "loss": whole["loss"][:1] + found["loss"]}, whole)


FORMS = {
    "nothing recomputed": ALONE | {"enable_gradient_checkpointing": False},
    "reentrant": ALONE | {"enable_reentrant": True},
    "parts recomputed": ALONE | {"recompute_modules": ["mlp", "self_attn"]},
    "the tower recomputed": ALONE | {"recompute_modules": ["vision"]},
    "offloaded activations": ALONE | {"enable_activation_offload": True},
    "not fused": ALONE | {"model": {"merge_qkv": False}},
}


@pytest.mark.dist
@pytest.mark.exhaustive
def test_the_same_is_computed_in_other_ways(tmp_path):
    model_type = written(tmp_path)
    jobs = {name: image_job(tmp_path, name, model_type, **how) for name, how in FORMS.items()}
    jobs["as it is"] = image_job(tmp_path, "as it is", model_type, **ALONE)
    [found] = on_ranks(1, each_steps, jobs)
    for name in FORMS:
        assert_same(found[name], found["as it is"])


PIPELINES = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.dist
@pytest.mark.exhaustive
def test_every_schedule_of_a_pipeline_computes_the_same(tmp_path):
    model_type = written(tmp_path)
    jobs = {
        name: image_job(
            tmp_path, name, model_type, pipeline_parallel_size=2, pipeline_parallel_schedule=name
        )
        for name in PIPELINES
    }
    found = on_ranks(2, each_steps, jobs)
    [alone] = on_ranks(1, steps, image_job(tmp_path, "alone", model_type, **ALONE))
    for ranks in found:
        for name in PIPELINES:
            assert_same(ranks[name], alone)


PRECISIONS = {
    "autocast": {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2},
    "fsdp2": {"data_parallel_shard_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "llava", "internvl", "mistral3"])
def test_bf16_is_near_fp32(tmp_path, model_type):
    written(tmp_path, model_type)
    mixed = {"enable_mixed_precision": True}
    jobs = {
        name: image_job(tmp_path, name, model_type, **mixed, **how)
        for name, how in PRECISIONS.items()
        if (name, model_type) != ("pp", "qwen3_vl")
    }
    found = on_ranks(2, each_steps, jobs)
    [alone] = on_ranks(1, steps, image_job(tmp_path, "alone", model_type, **ALONE))
    for ranks in found:
        for one in ranks.values():
            assert one["loss"][0] == pytest.approx(alone["loss"][0], rel=1e-2)
            assert one["grad_norm"][0] == pytest.approx(alone["grad_norm"][0], rel=5e-2)


PLAIN = ALONE | {"optimizer_kwargs": {}, "weight_decay": 0.0, "max_grad_norm": 0}
OPTIMIZERS = {
    "plain": PLAIN,
    "in the backward pass": PLAIN | {"fuse_optimizer_step": True, "micro_batch_size": 4},
    "layer-wise rates": PLAIN | {"layerwise_lr_decay_bound": 0.5},
    "muon": PLAIN | {"optimizer": "muon", "lr": 1e-3, "muon_lr": 1e-3},
    "rounded": PLAIN
    | {"optimizer": "anyprecision_adamw", "lr": 1e-3, "precision": "bf16"}
    | {"stochastic_rounding": True},
}


def one_step_each(jobs):
    return {name: steps(job, 1) for name, job in jobs.items()}


@pytest.mark.dist
@pytest.mark.exhaustive
def test_optimizers_update_the_vision_part(tmp_path):
    model_type = written(tmp_path)
    jobs = {name: image_job(tmp_path, name, model_type, **how) for name, how in OPTIMIZERS.items()}
    [found] = on_ranks(1, one_step_each, jobs)
    plain, layered = found["plain"], found["layer-wise rates"]
    was = {
        name: one.detach().numpy() for name, one in loaded(tmp_path / model_type).named_parameters()
    }
    for name in filter(is_vision, plain["weights"]):
        for one in found.values():
            assert np.isfinite(one["weights"][name]).all()
            assert (one["weights"][name] != was[name]).any()
        moved, less = (one["weights"][name] - was[name] for one in (plain, layered))
        assert np.linalg.norm(moved / 2 - less) <= 1e-3 * np.linalg.norm(moved)


def test_features_after_layers_of_a_later_stage_are_refused(tmp_path):
    hf_config = image_model("qwen3_vl").config.to_dict()
    config = get_family(hf_config).read(hf_config)
    run = runs.run_config(tmp_path / "out", tmp_path / "model", pipeline_parallel_size=2)
    why = "puts 1 of the model's layers into the first stage, and image features are added after"
    with pytest.raises(ConfigError, match=why):
        checked_vision(run, hf_config, config, images=True)


def calls_of_parts(job):
    """Calls of a layer of the tower and of one of the language model in a step's forward and
    backward passes."""
    loop = loop_of(job)
    decoder = decoder_of(loop)
    assert decoder.vision is not None
    # Of a part of the block, whose own hooks are around what is recomputed.
    inner = decoder.vision.blocks[0].get_submodule("mlp")
    parts = {"tower": inner, "text": decoder.model.layers["0"].mlp}
    seen = {name: calls_of(one, lambda _: None) for name, one in parts.items()}
    steps_of(loop, job, 1)
    return {name: len(calls) for name, calls in seen.items()}


def calls_of_each(jobs):
    return {name: calls_of_parts(job) for name, job in jobs.items()}


@pytest.mark.dist
@pytest.mark.exhaustive
def test_the_tower_is_recomputed_if_it_is_named_or_nothing_is(tmp_path):
    model_type = written(tmp_path)
    named = {"all": None, "tower": ["vision"], "text": ["mlp"], "both": ["vision", "mlp"]}
    jobs = {
        name: image_job(tmp_path, name, model_type, recompute_modules=modules, **ALONE)
        for name, modules in named.items()
    }
    [found] = on_ranks(1, calls_of_each, jobs)
    times = {
        name: tuple(count // len(NUMBERS) for count in calls.values())
        for name, calls in found.items()
    }
    assert times == {"all": (2, 2), "tower": (2, 1), "text": (1, 2), "both": (2, 2)}


def test_a_tower_that_is_not_there_is_not_recomputed(tmp_path):
    hf_config = image_model("qwen2_5_vl").config.to_dict()
    config = get_family(hf_config).read(hf_config)
    run = runs.run_config(tmp_path / "out", tmp_path / "m", recompute_modules=["vision", "mlp"])
    with pytest.raises(ConfigError, match=r"the data has no images: there is no vision tower"):
        checked_vision(run, hf_config, config, images=False)
