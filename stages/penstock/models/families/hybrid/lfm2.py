"""LFM2: gated short convolutions, and some layers of attention with QK norm; dense, or with experts
in all but the first layers."""

from typing import Any

from penstock.models.decoder_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    TensorNames,
)
from penstock.models.families.hybrid.fields import ROLES, layers_of_kind
from penstock.models.family import Family
from penstock.models.hf_config import (
    FULL,
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.short_conv_config import ShortConvConfig

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


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an LFM2's config.json."""
    return lfm2_config(hf, _attention_layers(hf), intermediate_size=_intermediate_size(hf))


def read_moe(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an LFM2's with experts."""
    return lfm2_config(hf, config_require(hf, "layer_types"), experts=_experts(hf))


def lfm2_config(hf: HfConfig, types: list[str], **specific: Any) -> DecoderConfig:
    """The DecoderConfig of an LFM2 with these values; `types` are its default layer_types."""
    tied = config_get(hf, "tie_word_embeddings", True)
    kernel, bias = config_get(hf, "conv_L_cache", 3), config_get(hf, "conv_bias", False)
    return decoder_config(
        hf,
        rms_norm_eps=config_get(hf, "norm_eps", 1e-5),
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        qk_norm=True,
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=1_000_000.0)),
        tie_word_embeddings=bool(config_get(hf, "tie_embedding", tied)),
        linear=ShortConvConfig(config_require(hf, "hidden_size"), kernel, bool(bias)),
        linear_layers=layers_of_kind(hf, CONV, types),
        names=NAMES,
        **specific,
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count, dense = config_get(hf, "num_experts", 32), config_get(hf, "num_dense_layers", 2)
    layers = tuple(range(dense, config_require(hf, "num_hidden_layers")))
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 4),
        intermediate_size=config_get(hf, "moe_intermediate_size", 1792),
        scoring="sigmoid",
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", True)),
        norm_eps=1e-6,
        scale=config_get(hf, "routed_scaling_factor", 1.0),
        selection_bias=(count,) if config_get(hf, "use_expert_bias", True) else (),
        names=EXPERT_NAMES,
    )


def _attention_layers(hf: HfConfig) -> list[str]:
    every = range(config_require(hf, "num_hidden_layers"))
    attending = config_get(hf, "full_attn_idxs", every)
    return [FULL if layer in attending else CONV for layer in every]


def _intermediate_size(hf: HfConfig) -> int:
    """The size of MLPs, which by default is two thirds of the one in config.json, rounded up."""
    size = config_get(hf, "block_ff_dim", config_require(hf, "intermediate_size"))
    if not hf.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor = int(2 * size / 3), hf.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    unit = config_get(hf, "block_multiple_of", 256)
    return -(-int(factor * size) // unit) * unit


LFM2 = Family("lfm2", "Lfm2ForCausalLM", read, ROLES, lora_targets=LORA_TARGETS)
LFM2_MOE = Family("lfm2_moe", "Lfm2MoeForCausalLM", read_moe, ROLES, lora_targets=LORA_TARGETS)
