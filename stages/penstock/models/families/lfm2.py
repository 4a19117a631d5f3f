"""LFM2: gated short convolutions, and some layers of attention with QK norm; dense, or with experts
in all but the first layers."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames, TensorNames
from penstock.models.families.layers import layers_of_kind, read_experts
from penstock.models.family import Family
from penstock.models.hf_config import (
    FULL,
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    full_rope,
)
from penstock.models.short_conv_config import ShortConvConfig
from penstock.models.tp_roles import LINEAR_ATTENTION_ROLES

CONV = ShortConvConfig.layer_type

NAMES = TensorNames(
    norm="embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    o_proj="self_attn.out_proj",
    gate_proj="feed_forward.w1",
    up_proj="feed_forward.w3",
    down_proj="feed_forward.w2",
)
EXPERT_NAMES = ExpertNames(
    block="feed_forward",
    module="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
    selection_bias="expert_bias",
    known_to_peft=False,
)
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3")


def lfm2_config(hf: HfConfig, types: list[str], **specific: Any) -> DecoderConfig:
    """The DecoderConfig of an LFM2 with these values; `types` are its default layer_types."""
    tied = config_get(hf, "tie_word_embeddings", True)
    kernel, bias = config_get(hf, "conv_L_cache", 3), config_get(hf, "conv_bias", False)
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 8},
        rms_norm_eps=config_get(hf, "norm_eps", 1e-5),
        qk_norm=True,
        rope_parameters=full_rope(hf, theta=1_000_000.0),
        # Older files say `tie_embedding`, which comes first in transformers' Lfm2Config.
        tie_word_embeddings=bool(config_get(hf, "tie_embedding", tied)),
        linear=ShortConvConfig(config_require(hf, "hidden_size"), kernel, bool(bias)),
        linear_layers=layers_of_kind(hf, CONV, types),
        names=NAMES,
        **specific,
    )


def read_lfm2(hf: HfConfig) -> DecoderConfig:
    """LFM2, dense."""
    every = range(config_require(hf, "num_hidden_layers"))
    attending = config_get(hf, "full_attn_idxs", every)
    types = [FULL if layer in attending else CONV for layer in every]
    # By default two thirds of the size in config.json, rounded up.
    size = config_get(hf, "block_ff_dim", config_require(hf, "intermediate_size"))
    if hf.get("block_auto_adjust_ff_dim", True):
        size, factor = int(2 * size / 3), hf.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            unit = config_get(hf, "block_multiple_of", 256)
            size = -(-int(factor * size) // unit) * unit
    return lfm2_config(hf, types, intermediate_size=size)


def read_lfm2_moe(hf: HfConfig) -> DecoderConfig:
    """LFM2 with experts."""
    count, dense = config_get(hf, "num_experts", 32), config_get(hf, "num_dense_layers", 2)
    experts = read_experts(
        hf,
        range(dense, config_require(hf, "num_hidden_layers")),
        count=count,
        chosen=4,
        width=1792,
        normalized=True,
        scoring="sigmoid",
        norm_eps=1e-6,
        scale=config_get(hf, "routed_scaling_factor", 1.0),
        selection_bias=(count,) if config_get(hf, "use_expert_bias", True) else (),
        names=EXPERT_NAMES,
    )
    return lfm2_config(hf, config_require(hf, "layer_types"), experts=experts)


LFM2 = Family("lfm2", "Lfm2ForCausalLM", read_lfm2, LINEAR_ATTENTION_ROLES, LORA_TARGETS)
LFM2_MOE = Family(
    "lfm2_moe", "Lfm2MoeForCausalLM", read_lfm2_moe, LINEAR_ATTENTION_ROLES, LORA_TARGETS
)
