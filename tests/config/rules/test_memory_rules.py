"""Settings of memory, determinism and profiles that cannot be honoured are refused with the reason
and the way out."""

from typing import Any

import pytest

from tests.config.values import refused_and_mended

# Sections, where the fault is told, words of the reason, and what mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"train": {"init_device": "npu", "data_parallel_mode": "ddp"}},
        "train.init_device",
        "write cpu",
        {"train": {"init_device": "cpu"}},
    ),
    (
        {"train": {"enable_profiling": True, "profile_start_step": 3}},
        "train.profile_end_step",
        "write profile_end_step: 4",
        {"train": {"profile_end_step": 5}},
    ),
    (
        {"train": {"log_dir": "logs"}},
        "train.log_dir",
        "is the folder of TensorBoard's event files",
        {"train": {"use_tensorboard": True}},
    ),
    (
        {"train": {"recompute_modules": ["mlp"], "enable_gradient_checkpointing": False}},
        "train.recompute_modules",
        "nothing is recomputed",
        {"train": {"recompute_modules": None}},
    ),
    (
        {
            "model": {"model_path": "m"},
            "data": {"encode_images": True},
            "train": {"recompute_modules": ["vision", "mlp"]},
        },
        "train.recompute_modules",
        "has vision, and with encode_images: true no step computes images",
        {"train": {"recompute_modules": ["mlp"]}},
    ),
    (
        {"train": {"activation_gpu_limit": 2.0}},
        "train.activation_gpu_limit",
        "all activations stay on the GPU",
        {"train": {"enable_activation_offload": True}},
    ),
    (
        {"train": {"enable_full_determinism": True}},
        "train.enable_full_determinism",
        "sets CUDA_LAUNCH_BLOCKING=1",
        {"train": {"allow_cuda_launch_blocking": True}},
    ),
    (
        {"launch": {"env": {"CUDA_LAUNCH_BLOCKING": "1"}}},
        "launch.env",
        "write train.allow_cuda_launch_blocking: true",
        {"train": {"allow_cuda_launch_blocking": True}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_what_cannot_be_honoured_is_refused_with_what_can(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended(sections, where, reason, mended)
