"""ERNIE 4.5: interleaved RoPE (GPT-J style); dense, with experts, and with experts of their own for
the tokens of images."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    full_rope,
)

BIAS = "moe_statics.e_score_correction_bias"
NAMES = ExpertNames(selection_bias=BIAS)
# As in transformers' modules; files have both routers' tensors in another form.
VL_NAMES = ExpertNames(
    router="text_moe.gate",
    selection_bias=f"text_moe.gate.{BIAS}",
    image_router="vision_moe.gate",
    image_selection_bias=f"vision_moe.gate.{BIAS}",
    known_to_peft=False,
)

# The top-k softmax weights always sum to more than this, so a lower bound on the sum that is at
# most this large has no effect.
MIN_TOPK_SUM = 1e-9


def ernie_config(hf: HfConfig, defaults: dict[str, Any], **specific: Any) -> DecoderConfig:
    """The DecoderConfig of an ERNIE 4.5, with these defaults and values."""
    return decoder_config(
        hf,
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, **defaults},
        rope_parameters=full_rope(hf, theta=500_000.0),
        rope_pairs="neighbours",
        # transformers' code of this family casts queries and keys to fp32 to rotate them (5.23).
        rope_fp32=True,
        **specific,
    )


def read_ernie(hf: HfConfig) -> DecoderConfig:
    """ERNIE 4.5, dense."""
    bias = bool(config_get(hf, "use_bias", False))
    return ernie_config(hf, {"head_dim": 128}, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def read_moe(hf: HfConfig) -> DecoderConfig:
    """ERNIE 4.5 MoE: softmax router with a bias, shared experts, dense first layers."""
    num_layers = config_require(hf, "num_hidden_layers")
    first, last = (
        config_get(hf, "moe_layer_start_index", 1),
        config_get(hf, "moe_layer_end_index", -1),
    )
    last = num_layers - 1 if last == -1 else min(last, num_layers - 1)
    step = config_get(hf, "moe_layer_interval", 1)
    layers = tuple(layer for layer in range(first, last + 1) if (layer + 1) % step == 0)
    width = config_get(hf, "moe_intermediate_size", 1536)
    experts = _experts(hf, layers, width, aux_loss_coef=aux_loss_coef(hf), names=NAMES)
    return ernie_config(hf, {}, not_native=_not_native(hf), experts=experts)


def read_vl_moe(hf: HfConfig) -> DecoderConfig:
    """The language model of ERNIE-4.5-VL: tokens of images have a router and experts of their own,
    beside shared experts of all tokens."""
    of_text, of_images = config_get(hf, "moe_intermediate_size", [1536, 512])
    dense_first = ["dense", *["sparse"] * (config_require(hf, "num_hidden_layers") - 1)]
    kinds = config_get(hf, "mlp_layer_types", dense_first)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    experts = _experts(
        hf, layers, of_text, image_intermediate_size=of_images, adaptable=False, names=VL_NAMES
    )
    defaults = {"num_key_value_heads": 4}
    return ernie_config(hf, defaults, not_native=_not_native(hf), experts=experts)


def _experts(
    hf: HfConfig, layers: tuple[int, ...], width: int, **specific: Any
) -> ExpertsConfig | None:
    count = config_get(hf, "moe_num_experts", 64)
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "moe_k", 6),
        intermediate_size=width,
        shared_intermediate_size=width * config_get(hf, "moe_num_shared_experts", 2),
        selection_bias=(1, count),
        # Of transformers' `_keep_in_fp32_modules_strict` (5.23): gates are in fp32 beside a model
        # in bf16.
        fp32_router=True,
        **specific,
    )


def _not_native(hf: HfConfig) -> list[str]:
    reasons: list[str] = []
    if config_get(hf, "use_bias", False):
        reasons.append("use_bias is true; projections without biases are computed")
    if (min_sum := config_get(hf, "moe_norm_min", 1e-12)) > MIN_TOPK_SUM:
        reasons.append(f"moe_norm_min is {min_sum}; up to {MIN_TOPK_SUM} is computed")
    return reasons


ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", read_ernie)
ERNIE4_5_MOE = Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", read_moe)
ERNIE4_5_VL_MOE = Family("ernie4_5_vl_moe_text", "Ernie4_5_VLMoeTextModel", read_vl_moe)
