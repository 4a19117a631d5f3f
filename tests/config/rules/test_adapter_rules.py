"""Settings of adapters that contradict one another, or others, are refused with the way out."""

from typing import Any

import pytest

from tests.config.values import refused_and_mended

ON = {"enable_lora": True}
QUANTIZED = {**ON, "enable_qlora": True}
MERGED = {**ON, "merge_lora_interval": 10}

# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    ({"lora": {"save_lora_only": True}}, "lora.save_lora_only", "no adapters", {"lora": ON}),
    ({"lora": {"moe_shared_lora": True}}, "lora.moe_shared_lora", "no adapters", {"lora": ON}),
    ({"lora": {"init_adapter_path": "x"}}, "lora.init_adapter_path", "no adapters", {"lora": ON}),
    (
        {"lora": {"merge_lora_interval": 10}},
        "lora.merge_lora_interval",
        "no adapters",
        {"lora": ON},
    ),
    (
        {"lora": {"reset_optimizer_on_merge": True}},
        "lora.reset_optimizer_on_merge",
        "no adapters",
        {"lora": MERGED},
    ),
    (
        {"lora": {**ON, "reset_optimizer_on_merge": True}},
        "lora.reset_optimizer_on_merge",
        "never merged with merge_lora_interval: 0",
        {"lora": MERGED},
    ),
    (
        {"lora": {**MERGED, "use_dora": True}},
        "lora.merge_lora_interval",
        "merges low-rank products every 10 step(s)",
        {"lora": {"use_dora": False}},
    ),
    (
        {"lora": {**MERGED, "save_lora_only": True}},
        "lora.merge_lora_interval",
        "merges adapters into the model every 10 step(s)",
        {"lora": {"save_lora_only": False}},
    ),
    (
        {"lora": MERGED, "export": {"merge_lora": False}},
        "lora.merge_lora_interval",
        "merges adapters into the model every 10 step(s)",
        {"lora": {"merge_lora_interval": 0}},
    ),
    (
        {"lora": ON, "export": {"quantise": "int8", "merge_lora": False}},
        "export.quantise",
        "int8 quantizes the merged model",
        {"export": {"merge_lora": True}},
    ),
    (
        {"lora": {**ON, "moe_shared_lora": True, "moe_hybrid_shared_lora": True}},
        "lora.moe_shared_lora",
        "write only one of the two",
        {"lora": {"moe_hybrid_shared_lora": False}},
    ),
    (
        {"lora": {**ON, "quant_format": "nf4"}},
        "lora.quant_format",
        "nothing is quantized",
        {"lora": QUANTIZED},
    ),
    (
        {"lora": {**ON, "exclude_modules": ["o_proj"]}},
        "lora.exclude_modules",
        "nothing is quantized",
        {"lora": QUANTIZED},
    ),
    (
        {"lora": {**QUANTIZED, "quant_format": "block_fp8", "quant_group_size": 32}},
        "lora.quant_group_size",
        "has groups of 128",
        {"lora": {"quant_group_size": 128}},
    ),
    (
        {"lora": {**QUANTIZED, "quant_format": "int8", "quant_group_size": 64}},
        "lora.quant_group_size",
        "one scale for each row",
        {"lora": {"quant_format": "nf4"}},
    ),
    (
        {"lora": {**QUANTIZED, "aqn_alpha": 2}},
        "lora.aqn_alpha",
        "no noise is added",
        {"lora": {"enable_aqn": True}},
    ),
    (
        {"lora": {**QUANTIZED, "enable_aqn": True, "use_dora": True}},
        "lora.enable_aqn",
        "its noise would change the norms of rows",
        {"lora": {"use_dora": False}},
    ),
    (
        {"train": {"moe_bias_update_rate": 0.001}, "lora": ON},
        "train.moe_bias_update_rate",
        "changes biases of the model itself",
        {"train": {"moe_bias_update_rate": 0}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_adapters_that_cannot_be_are_refused_and_mended_by_what_is_proposed(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended(sections, where, reason, mended)
