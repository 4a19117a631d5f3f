"""Learning rates of the parts of a model trained on images (`train.vision_lr`, `projector_lr`)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from tests.engine import runs
from tests.engine.vision.steps import LR, image_job, loaded, steps, write_model
from tests.engine.vision.test_freeze import part_of
from tests.engine.vision.test_image_training import LAYOUTS, compare
from tests.ranks import on_ranks

PLAIN: dict[str, Any] = {
    "data_parallel_mode": "none",
    "optimizer_kwargs": {},
    "weight_decay": 0.0,
    "max_grad_norm": 0,
    "max_steps": 1,
}
ALL = [name for name, how in LAYOUTS.items() if "model" not in how]
"""Layouts in which all parts are trained."""
RATES = {"vision": LR / 4, "projector": 2 * LR, "language": LR}


def once(job):
    return steps(job, 1)


def refusal(job):
    with pytest.raises(ConfigError) as caught:
        steps(job, 1)
    return str(caught.value)


@pytest.mark.dist
def test_parts_learn_at_their_own_rates(tmp_path):
    write_model(tmp_path / "qwen3_vl", "qwen3_vl")
    runs.write_rows(tmp_path / "packed", 4)
    own = {f"{part}_lr": RATES[part] for part in ("vision", "projector")}
    [found] = on_ranks(1, once, image_job(tmp_path, "own", "qwen3_vl", **PLAIN, **own))
    was = {
        name: one.detach().numpy() for name, one in loaded(tmp_path / "qwen3_vl").named_parameters()
    }
    seen = set()
    for name, gradient in found["gradients"].items():
        stored = name.replace("model.", "model.language_model.") if name not in was else name
        if stored not in was:
            continue
        part = part_of(name)
        seen.add(part)
        moved = found["weights"][name] - was[stored]
        assert np.allclose(moved, -RATES[part] * gradient, rtol=1e-3, atol=1e-6), name
    assert seen == RATES.keys()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llava", ["pp 2"]),
        *(
            pytest.param(one, ALL, marks=pytest.mark.exhaustive)
            for one in ("qwen2_5_vl", "mistral3", "llava")
        ),
    ],
    ids=["in a pipeline", "qwen2_5_vl", "mistral3", "llava"],
)
def test_rates_of_parts_are_the_same_in_every_layout(tmp_path, model_type, names):
    own = {f"{part}_lr": RATES[part] for part in ("vision", "projector")}
    compare(tmp_path, model_type, {name: LAYOUTS[name] for name in names}, 2, **own)


@pytest.mark.dist
@pytest.mark.exhaustive
def test_the_rate_of_a_part_that_is_not_trained_is_refused(tmp_path):
    write_model(tmp_path / "qwen3_vl", "qwen3_vl")
    runs.write_rows(tmp_path / "packed", 4)
    job = image_job(tmp_path, "adapted", "qwen3_vl", **PLAIN, vision_lr=0.1)
    lora = job.config.lora.model_copy(update={"enable_lora": True})
    adapted = replace(job, config=job.config.model_copy(update={"lora": lora}))
    [said] = on_ranks(1, refusal, adapted)
    assert "no parameter of the vision is trained" in said
