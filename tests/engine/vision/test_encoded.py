"""Steps on stored features of images, which are those of a frozen vision part in the step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.run import trains_projector
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.hf.config import read_hf_config
from penstock.engine.vision.encoded import load_tower, require_encodable
from penstock.models.vision.features import PROJECTORS, encode_images
from penstock.models.vision.types import VISION_TYPES, is_vision, read_vision
from penstock.rows.image_batch import ImageBatch
from tests.engine import runs
from tests.engine.loops import before_each_update, gradients_of, loop_of
from tests.engine.vision.steps import LENGTH, LR, image_job, write_model
from tests.models.images import image_documents, joined, micro_batch
from tests.ranks import on_ranks

ONE_IMAGE = ([1, 0], [0], [0, 1], [1])
"""Images of each document of the micro-batches of a step."""
SEVERAL = ([2, 0], [0], [3], [1, 2])
BOTH, TOWER = ["vision", "projector"], ["vision"]


def encoding(job):
    """The same run on stored features."""
    data = job.config.data.model_copy(update={"encode_images": True})
    return replace(job, config=job.config.model_copy(update={"data": data}))


def encoded(job, batch):
    """The micro-batch with what is stored of its images, each of which is encoded alone."""
    if batch.images is None:
        return batch
    tower = load_tower(read_hf_config(job.config_path, {}), job.weights)
    tensors = batch.images.tensors
    per_image = len(tensors["pixel_values"]) == len(batch.images)
    sizes = [1] * len(batch.images) if per_image else tensors["image_grid_thw"].prod(-1).tolist()
    each = []
    for at, pixels in enumerate(tensors["pixel_values"].split(sizes)):
        others = {name: one[at : at + 1] for name, one in tensors.items() if name != "pixel_values"}
        if "image_sizes" in others and pixels.ndim == 4:
            height, width = others["image_sizes"][0].tolist()
            pixels = pixels[..., :height, :width].contiguous()
        alone = {"pixel_values": pixels, **others}
        each.append(encode_images(tower, alone, projected=not trains_projector(job.config)))
    stored = joined([ImageBatch(one, (0,)) for one in each])
    assert stored is not None
    lengths = {name: tuple(len(one[name]) for one in each) for name in stored.tensors}
    counts = batch.images.token_counts
    return replace(batch, images=replace(stored, token_counts=counts, sizes=lengths))


def step(job, numbers, *, stored=False):
    """Loss, gradients and number of the weights of a step."""
    job = encoding(job) if stored else job
    loop = loop_of(job)
    model_type = read_hf_config(job.config_path, {})["model_type"]
    batches = [micro_batch(*image_documents(model_type, one), length=LENGTH) for one in numbers]
    dims = loop.built.dims
    at, count = loop.built.engine.model.mesh.index("replicate", "shard"), dims.num_replicas
    mine = batches[at * 4 // count : (at + 1) * 4 // count]
    seen = before_each_update(loop, lambda: gradients_of(loop))
    result = loop.built.engine.step([encoded(job, one) if stored else one for one in mine], LR, 0)
    parts = loop.built.engine.model.parts
    weights = sum(one.numel() for part in parts for one in part.parameters())
    return {"loss": result.loss, "gradients": seen[0], "weights": weights}


def compared(jobs):
    torch.set_num_threads(1)
    return {
        name: [step(job, numbers, stored=stored) for stored in (False, True)]
        for name, (job, numbers) in jobs.items()
    }


def jobs_of(tmp_path, families, **train):
    runs.write_rows(tmp_path / "packed", 4)
    found = {}
    for model_type in families:
        write_model(tmp_path / model_type, model_type)
        for freeze in (BOTH, TOWER) if model_type in PROJECTORS else (BOTH,):
            for numbers in (ONE_IMAGE, SEVERAL):
                how = {"model": {"freeze": freeze}, **(train or {"data_parallel_mode": "none"})}
                images = "one image" if numbers is ONE_IMAGE else "several"
                part = "frozen" if freeze is BOTH else "trained"
                name = f"{model_type}, projector {part}, {images}"
                found[name] = image_job(tmp_path, name, model_type, **how), numbers
    return found


ALL = pytest.param([*VISION_TYPES], marks=pytest.mark.exhaustive)


def assert_near(stored, computed):
    assert stored["loss"] == pytest.approx(computed["loss"], rel=1e-6)
    assert stored["gradients"].keys() == computed["gradients"].keys()
    for name, value in computed["gradients"].items():
        assert np.abs(stored["gradients"][name] - value).max() <= 1e-6, name


@pytest.mark.dist
@pytest.mark.parametrize("families", [["qwen3_vl", "llava"], ALL], ids=["two", "all"])
def test_a_step_on_features_is_bitwise_one_with_the_frozen_vision_part(tmp_path, families):
    [found] = on_ranks(1, compared, jobs_of(tmp_path, families))
    for name, (computed, stored) in found.items():
        assert stored["weights"] < computed["weights"]
        assert any(map(is_vision, stored["gradients"])) == ("projector trained" in name)
        assert_near(stored, computed)
        if "one image" in name:
            assert stored["loss"] == computed["loss"]
            for one, value in computed["gradients"].items():
                assert np.array_equal(stored["gradients"][one], value), (name, one)


@pytest.mark.dist
@pytest.mark.exhaustive
def test_features_train_the_same_in_any_layout(tmp_path):
    alone = jobs_of(tmp_path, ["llava", "qwen2_vl"])
    [wanted] = on_ranks(1, compared, alone)
    layouts = (
        {"data_parallel_shard_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2},
    )
    for number, layout in enumerate(layouts):
        jobs = jobs_of(tmp_path / str(number), ["llava", "qwen2_vl"], **layout)
        for ranks in on_ranks(2, compared, jobs):
            for name, (_, stored) in ranks.items():
                assert_near(stored, wanted[name][0])


def test_what_would_change_features_is_refused(tmp_path):
    def refused(model_type, why, kind: type[Exception] = ConfigError, **sections):
        write_model(tmp_path / model_type, model_type)
        job = encoding(image_job(tmp_path, "out", model_type, **sections.pop("train", {})))
        run = job.config.model_copy(update=sections)
        with pytest.raises(kind, match=why):
            require_encodable(run, read_vision(read_hf_config(job.config_path, {})))

    runs.write_rows(tmp_path / "packed", 4)
    trained = {"train": {"model": {"freeze": TOWER}}}
    why = "of models of type mistral3 is not called on stored inputs"
    refused("mistral3", why, CapabilityError, **trained)
    adapted = LoraConfig(enable_lora=True, lora_target_modules=["visual.blocks.0.attn.qkv"])
    refused("qwen2_vl", "lora_target_modules names layers of the vision part", lora=adapted)
