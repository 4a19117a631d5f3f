"""Rough costs of a vision part, beside transformers' parameters."""

import pytest
import torch
import transformers

from penstock.engine.distributed.parallel_dims import build_parallel_dims
from penstock.estimate.costs.device_speed import Machine
from penstock.estimate.costs.estimate import build_cost_model, predict, with_images
from penstock.estimate.costs.token_counts import Data
from penstock.models.vision.sizes import read_sizes
from penstock.models.vision.tower import VisionTower
from penstock.models.vision.types import VISION_TYPES, read_vision
from tests.engine import runs
from tests.models.images import image_model


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.exhaustive)
        for name in VISION_TYPES
    ],
)
def test_parameters_are_nearly_those_of_transformers(model_type):
    hf_config = transformers.AutoConfig.for_model(model_type).to_dict()
    config = read_vision(hf_config)
    with torch.device("meta"):
        tower = VisionTower(config)
    counts = {True: 0, False: 0}
    for name, parameter in tower.named_parameters():
        counts[config.is_projector(name)] += parameter.numel()
    sizes = read_sizes(hf_config)
    assert sizes is not None
    assert sizes.tower == pytest.approx(counts[False], rel=0.02)
    assert sizes.projector == pytest.approx(counts[True], rel=0.02)
    assert sizes.layers == len(tower.blocks)
    kind = hf_config["vision_config"]["model_type"]
    full = transformers.AutoConfig.for_model(kind).to_dict()
    several = [
        read_sizes({"model_type": model_type, "text_config": {}, "vision_config": vision})
        for vision in ({"model_type": kind}, full)
    ]
    assert len({(one.tower, one.layers, one.width) for one in several if one}) == 1
    assert all(several)


def test_trained_towers_cost_more_than_frozen_ones_and_text_costs_what_it_did(tmp_path):
    hf_config = image_model("qwen2_5_vl").config.to_dict()
    machine = Machine("x", "cuda", {"fp32": 1e12, "bf16": 1e12}, 1e12, "tabled", 80e9)
    text = Data((100,), 20_000, 200, 10_000, "counted")
    images = Data((100,), 20_000, 200, 10_000, "counted", image_tokens=5_000)

    def predicted(data, **model):
        settings = {"data_parallel_mode": "none", **model}
        run = runs.run_config(tmp_path / "out", tmp_path / "model", **settings)
        plain = build_cost_model(run, hf_config)
        degrees = build_parallel_dims(run.train, 1)
        return predict(run, with_images(plain, run, hf_config, data), degrees, machine, data)

    without, frozen = predicted(text), predicted(images)
    trained = predicted(images, model={"freeze": []})
    sizes = read_sizes(hf_config)
    assert sizes is not None
    tokens = 5_000 / 100 * 4
    forward = 2 * (sizes.tower * tokens * 4 + sizes.projector * tokens)
    assert frozen.flops_per_step - without.flops_per_step == pytest.approx(forward)
    assert trained.flops_per_step - without.flops_per_step == pytest.approx(3 * forward)
    weights = 4 * (sizes.tower + sizes.projector)
    assert frozen.memory.weights - without.memory.weights == pytest.approx(weights)
    assert frozen.memory.optimizer == without.memory.optimizer
    assert trained.memory.optimizer - without.memory.optimizer == pytest.approx(2 * weights)
    assert trained.memory.total > frozen.memory.total > without.memory.total
    assert frozen.disk.checkpoint == without.disk.checkpoint
    assert trained.disk.checkpoint - without.disk.checkpoint == pytest.approx(3 * weights)
    for one in (frozen, trained):
        assert one.disk.exported - without.disk.exported == pytest.approx(weights)
    assert without.step is not None
    assert frozen.step is not None
    assert trained.step is not None
    assert without.step.products < frozen.step.products < trained.step.products
