"""Llama 4, text: one expert per token, whose weight multiplies its input, and a shared expert; full
attention without RoPE in every fourth layer, where queries are scaled by their position, and in the
others attention in chunks, interleaved RoPE and QK norm without a weight."""

from collections.abc import Sequence

from penstock.models.decoder_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    QueryScale,
    TensorNames,
)
from penstock.models.family import Family
from penstock.models.hf_config import (
    CHUNKED,
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = TensorNames(
    gate_proj="feed_forward.gate_proj",
    up_proj="feed_forward.up_proj",
    down_proj="feed_forward.down_proj",
)
EXPERT_NAMES = ExpertNames(
    block="feed_forward",
    router="router",
    gate_up_stack="experts.gate_up_proj",
    down_stack="experts.down_proj",
    shared="shared_expert",
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Llama 4's text config."""
    reasons = []
    if (count := config_get(hf, "num_experts_per_tok", 1)) != 1:
        reasons.append(f"num_experts_per_tok is {count}; one expert per token is computed")
    without_rope, chunk = _layers_without_rope(hf), hf.get("attention_chunk_size", 8192)
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        not_native=reasons,
        named={"intermediate_size": "intermediate_size_mlp"},
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        head_dim=config_get(hf, "head_dim", 128),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=500_000.0)),
        rope_pairs="neighbours",
        rope_fp32=True,
        no_rope_layers=without_rope,
        qkv_bias=bias,
        o_bias=bias,
        qk_unit_norm=bool(config_get(hf, "use_qk_norm", True)),
        query_scale=_query_scale(hf),
        attention_chunk=chunk,
        chunked_layers=() if chunk is None else _chunked_layers(hf, without_rope),
        experts=None if reasons else _experts(hf),
        names=NAMES,
    )


def _layers_without_rope(hf: HfConfig) -> tuple[int, ...]:
    """Indices of the layers that `no_rope_layers` has a 0 for: every fourth by default."""
    layers = range(config_require(hf, "num_hidden_layers"))
    has_rope: Sequence[int] = config_get(hf, "no_rope_layers", [])
    if not has_rope:
        step = config_get(hf, "no_rope_layer_interval", 4)
        has_rope = [(layer + 1) % step for layer in layers]
    return tuple(layer for layer, rope in zip(layers, has_rope, strict=False) if not rope)


def _chunked_layers(hf: HfConfig, without_rope: tuple[int, ...]) -> tuple[int, ...]:
    layers = range(config_require(hf, "num_hidden_layers"))
    if types := hf.get("layer_types"):
        return tuple(index for index, kind in enumerate(types) if kind == CHUNKED)
    return tuple(layer for layer in layers if layer not in without_rope)


def _query_scale(hf: HfConfig) -> QueryScale | None:
    if not config_get(hf, "attn_temperature_tuning", True):
        return None
    beta, length = config_get(hf, "attn_scale", 0.1), config_get(hf, "floor_scale", 8192)
    # transformers counts positions from 1 here.
    return QueryScale(beta, length, first=1, only_without_rope=True)


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    layers = range(config_require(hf, "num_hidden_layers"))
    sparse = hf.get("moe_layers")
    if sparse is None:
        step = config_get(hf, "interleave_moe_layer_step", 1)
        sparse = layers[step - 1 :: step]
    if not sparse:
        return None
    width = config_require(hf, "intermediate_size")
    return ExpertsConfig(
        layers=tuple(layer for layer in sparse if layer in layers),
        num_experts=config_get(hf, "num_local_experts", 16),
        experts_per_token=1,
        intermediate_size=width,
        shared_intermediate_size=width,
        scoring="sigmoid",
        norm_topk_prob=False,
        scales_inputs=True,
        transposed=True,
        # PEFT swaps the factors of these stacks: the class does not say that it transposes them.
        adaptable=False,
        names=EXPERT_NAMES,
    )


LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", read, ROLES)
