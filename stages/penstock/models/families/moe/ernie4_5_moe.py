"""ERNIE 4.5 MoE: softmax router with a bias, shared experts, dense first layers."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.dense.ernie4_5 import THETA
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(selection_bias="moe_statics.e_score_correction_bias")

MIN_TOPK_SUM = 1e-9
"""The top-k softmax weights always sum to more than this, so a lower bound on the sum that is at
most this large has no effect."""


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an ERNIE 4.5 MoE's config.json."""
    return decoder_config(
        hf,
        not_native=not_computed(hf),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=THETA)),
        rope_pairs="neighbours",
        rope_fp32=True,
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        experts=_experts(hf),
    )


def not_computed(hf: HfConfig) -> list[str]:
    """Settings that transformers alone computes."""
    reasons: list[str] = []
    if config_get(hf, "use_bias", False):
        reasons.append("use_bias is true; projections without biases are computed")
    if (min_sum := config_get(hf, "moe_norm_min", 1e-12)) > MIN_TOPK_SUM:
        reasons.append(f"moe_norm_min is {min_sum}; up to {MIN_TOPK_SUM} is computed")
    return reasons


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count, width = (
        config_get(hf, "moe_num_experts", 64),
        config_get(hf, "moe_intermediate_size", 1536),
    )
    num_layers = config_require(hf, "num_hidden_layers")
    first, last = (
        config_get(hf, "moe_layer_start_index", 1),
        config_get(hf, "moe_layer_end_index", -1),
    )
    last = num_layers - 1 if last == -1 else min(last, num_layers - 1)
    step = config_get(hf, "moe_layer_interval", 1)
    layers = tuple(layer for layer in range(first, last + 1) if (layer + 1) % step == 0)
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "moe_k", 6),
        intermediate_size=width,
        shared_intermediate_size=width * config_get(hf, "moe_num_shared_experts", 2),
        selection_bias=(1, count),
        fp32_router=True,
        aux_loss_coef=aux_loss_coef(hf),
        names=NAMES,
    )


ERNIE4_5_MOE = Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", read, ROLES)
