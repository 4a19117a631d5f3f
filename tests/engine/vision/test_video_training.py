"""Training on videos in every layout, judged by one process."""

import pytest
import torch

from tests.engine.loops import loop_of
from tests.engine.vision.steps import LENGTH, steps_of
from tests.engine.vision.test_image_training import LAYOUTS, OF_EXPERTS, PAIRS, compare
from tests.models.videos import ROWS, video_batch, video_documents


def batches(model_type):
    """The micro-batches of a step: documents with videos, images, both and neither."""
    return [
        video_batch(video_documents(model_type, media, seed=at), LENGTH)
        for at, media in enumerate(ROWS)
    ]


def video_steps(jobs):
    """`steps` of several runs on videos."""
    torch.set_num_threads(1)
    return {name: steps_of(loop_of(job), job, 2, make=batches) for name, job in jobs.items()}


def layouts_of(model_type, layouts):
    """Without pipelines for a model whose first stage cannot have the layers of DeepStack."""
    return {
        name: how for name, how in layouts.items() if "pp" not in name or model_type != "qwen3_vl"
    }


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_layouts_compute_what_one_process_computes(tmp_path, model_type):
    compare(tmp_path, model_type, layouts_of(model_type, LAYOUTS), 2, video_steps)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_layouts_of_experts_compute_what_one_process_computes(tmp_path, model_type):
    compare(tmp_path, model_type, OF_EXPERTS, 2, video_steps)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_two_axes_compute_what_one_process_computes(tmp_path, model_type):
    compare(tmp_path, model_type, layouts_of(model_type, PAIRS), 4, video_steps)
