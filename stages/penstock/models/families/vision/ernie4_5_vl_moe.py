"""The language model of ERNIE-4.5-VL: ERNIE 4.5 MoE whose tokens of images have a router and
experts of their own, beside shared experts of all tokens."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.dense.ernie4_5 import THETA
from penstock.models.families.moe.ernie4_5_moe import not_computed
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
BIAS = "moe_statics.e_score_correction_bias"
NAMES = ExpertNames(
    router="text_moe.gate",
    selection_bias=f"text_moe.gate.{BIAS}",
    image_router="vision_moe.gate",
    image_selection_bias=f"vision_moe.gate.{BIAS}",
    known_to_peft=False,
)
"""As in transformers' modules; files have both routers' tensors in another form."""


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an ERNIE-4.5-VL's text_config."""
    return decoder_config(
        hf,
        not_native=not_computed(hf),
        num_key_value_heads=config_get(hf, "num_key_value_heads", 4),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=THETA)),
        rope_pairs="neighbours",
        rope_fp32=True,
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        experts=_experts(hf),
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count = config_get(hf, "moe_num_experts", 64)
    of_text, of_images = config_get(hf, "moe_intermediate_size", [1536, 512])
    dense_first = ["dense", *["sparse"] * (config_require(hf, "num_hidden_layers") - 1)]
    kinds = config_get(hf, "mlp_layer_types", dense_first)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "moe_k", 6),
        intermediate_size=of_text,
        image_intermediate_size=of_images,
        shared_intermediate_size=of_text * config_get(hf, "moe_num_shared_experts", 2),
        selection_bias=(1, count),
        fp32_router=True,
        adaptable=False,
        names=NAMES,
    )


ERNIE4_5_VL_MOE = Family("ernie4_5_vl_moe_text", "Ernie4_5_VLMoeTextModel", read, ROLES)
