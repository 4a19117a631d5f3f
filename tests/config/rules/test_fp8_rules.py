"""Settings of products of 8 bits that contradict others are refused with the way out."""

from typing import Any

import pytest

from tests.config.values import refused_and_mended

ON: dict[str, Any] = {"enable_fp8_training": True}
ROUNDED: dict[str, Any] = {"recipe": "tensorwise"}
GATHERED: dict[str, Any] = {**ON, "fp8": ROUNDED, "enable_fp8_all_gather": True}

# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"train": {"fp8": ROUNDED}},
        "train.fp8.recipe",
        "there is no FP8 training with enable_fp8_training: false",
        {"train": ON},
    ),
    (
        {"train": {"fp8": {"exclude_modules": ["mlp"]}}},
        "train.fp8.exclude_modules",
        "there is no FP8 training with enable_fp8_training: false",
        {"train": ON},
    ),
    (
        {"train": {"enable_fp8_all_gather": True}},
        "train.enable_fp8_all_gather",
        "there is no FP8 training with enable_fp8_training: false",
        {"train": {**ON, "fp8": ROUNDED}},
    ),
    (
        {"train": ON, "lora": {"enable_lora": True, "enable_qlora": True}},
        "train.enable_fp8_training",
        "lora.enable_qlora: true dequantizes base weights and",
        {"lora": {"enable_qlora": False}},
    ),
    (
        {"train": {**ON, "precision": "fp16_mixed"}},
        "train.enable_fp8_training",
        "float16 does not have the range of FP8 values and their",
        {"train": {"precision": "bf16_mixed"}},
    ),
    (
        {"train": {**ON, "fp8": {"hadamard_block_size": 64}}},
        "train.fp8.hadamard_block_size",
        "is not used with hadamard: false",
        {"train": {"fp8": {"hadamard_block_size": 64, "hadamard": True}}},
    ),
    (
        {"train": {"fp8": {"hadamard_block_size": 64}}},
        "train.fp8.hadamard_block_size",
        "there is no FP8 training with enable_fp8_training: false",
        {"train": {"fp8": {}}},
    ),
    (
        {"train": {**ON, "fp8": {"exclude_modules": ["re:(mlp"]}}},
        "train.fp8.exclude_modules",
        "re:(mlp is not a valid regular expression",
        {"train": {"fp8": {"exclude_modules": ["re:mlp"]}}},
    ),
    (
        {"train": {**GATHERED, "data_parallel_mode": "ddp"}},
        "train.enable_fp8_all_gather",
        "data_parallel_mode: ddp does not all-gather weights",
        {"train": {"data_parallel_mode": "fsdp2"}},
    ),
    (
        {"train": {**GATHERED, "enable_fsdp_offload": True}},
        "train.enable_fp8_all_gather",
        "keeps them in host memory",
        {"train": {"enable_fsdp_offload": False}},
    ),
    (
        {"train": {**GATHERED, "enable_compile": True}},
        "train.enable_fp8_all_gather",
        "all-gathers a tensor subclass that torch.compile does",
        {"train": {"enable_compile": False}},
    ),
    (
        {"train": GATHERED, "lora": {"enable_lora": True, "use_dora": True}},
        "train.enable_fp8_all_gather",
        "gives layers quantized weights",
        {"lora": {"use_dora": False}},
    ),
    (
        {"train": {**GATHERED, "fp8": {}}},
        "train.enable_fp8_all_gather",
        "all-gathers weights that are quantized by rows",
        {"train": {"fp8": {"quantize_input_grad": False}}},
    ),
    (
        {"train": {**ON, "enable_compile": True, "tensor_parallel_size": 2}},
        "train.enable_compile",
        "the ranks of tensor_parallel_size (2) all-reduce scales",
        {"train": {"fp8": {"recipe": "blockwise"}}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_products_of_8_bits_that_cannot_be_are_refused_and_mended_by_what_is_proposed(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended(sections, where, reason, mended)
