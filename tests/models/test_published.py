"""What configurations of quantized checkpoints declare, as far as it is not read."""

from typing import Any

import pytest

from penstock.core.errors import CapabilityError
from penstock.models.quantization_config import QuantizationConfig, parse_quantization_config

COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
        }
    },
    "ignore": ["lm_head"],
}
FP8 = {"quant_method": "fp8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def compressed(**changed: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    weights = {**group["weights"], **changed}
    return {**COMPRESSED, "config_groups": {"group_0": {**group, "weights": weights}}}


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'; fp8, modelopt, bitsandbytes, compressed"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"load_in_8bit": True}, "8-bit bitsandbytes weights; only nf4"),
        ({"load_in_4bit": True}, "bnb_4bit_quant_type 'fp4'"),
        ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({**FP8, "modules_to_convert": ["embed_tokens"]}, "embeddings not"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
        ({**NVFP4, "group_size": 32}, "group_size 32 of NVFP4"),
        (compressed(symmetric=False), "not symmetric"),
        (compressed(actorder="group"), "in the order of activations"),
        (compressed(num_bits=8), r"pack-quantized weights of 8 bits \(int\) by group"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"u": {}}}}, "a transform_config"),
        ({**COMPRESSED, "config_groups": {}}, "in 0 ways"),
        (
            {
                **COMPRESSED,
                "config_groups": {
                    "a": COMPRESSED["config_groups"]["group_0"],
                    "b": compressed(group_size=32)["config_groups"]["group_0"],
                },
            },
            "in 2 ways",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_quantized_in_other_ways_is_refused_with_what_to_do(said, fault):
    with pytest.raises(CapabilityError, match=f"(?s){fault}.*model.model_path"):
        parse_quantization_config({"quantization_config": said})


def test_what_was_written_in_older_ways_is_read():
    groups = compressed(type="float", num_bits=8, strategy="block", block_structure="128x128")
    said = {**groups, "format": "float-quantized", "ignore": ["re:.*gate"]}
    tiles = QuantizationConfig("block_fp8", "compressed-tensors", 128, ("re:.*gate",))
    assert parse_quantization_config({"quantization_config": said}) == tiles
    assert parse_quantization_config(
        {"quantization_config": {**FP8, "ignored_layers": ["lm_head"]}}
    ) == QuantizationConfig("block_fp8", "fp8", 128, ("lm_head",))
    assert parse_quantization_config(
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    ) == QuantizationConfig("mxfp4", "mxfp4", 32, ("re:lm_head",))
    unnamed = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert parse_quantization_config({"quantization_config": unnamed}) == QuantizationConfig(
        "nf4", "bitsandbytes"
    )
    assert parse_quantization_config({"quantization_config": None}) is None
    assert parse_quantization_config({}) is None
