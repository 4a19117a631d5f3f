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
    FULL,
    HfConfig,
    attention_bias,
    config_get,
    config_require,
    decoder_config,
    full_rope,
)

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


def read_llama4(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Llama 4's text_config."""
    reasons = []
    if (count := config_get(hf, "num_experts_per_tok", 1)) != 1:
        reasons.append(f"num_experts_per_tok is {count}; one expert per token is computed")
    layers = range(config_require(hf, "num_hidden_layers"))
    # 1 marks a layer with RoPE, 0 one without: every fourth by default.
    marks: Sequence[int] = config_get(hf, "no_rope_layers", [])
    if not marks:
        step = config_get(hf, "no_rope_layer_interval", 4)
        marks = [(layer + 1) % step for layer in layers]
    without_rope = tuple(layer for layer, mark in zip(layers, marks, strict=False) if not mark)
    chunked: tuple[int, ...] = ()
    if (chunk := hf.get("attention_chunk_size", 8192)) is not None:
        types = hf.get("layer_types") or [
            FULL if layer in without_rope else CHUNKED for layer in layers
        ]
        chunked = tuple(index for index, kind in enumerate(types) if kind == CHUNKED)
    scale = None
    if config_get(hf, "attn_temperature_tuning", True):
        beta, length = config_get(hf, "attn_scale", 0.1), config_get(hf, "floor_scale", 8192)
        # transformers counts positions from 1 here.
        scale = QueryScale(beta, length, first=1, only_without_rope=True)
    return decoder_config(
        hf,
        not_native=reasons,
        named={"intermediate_size": "intermediate_size_mlp"},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        rope_parameters=full_rope(hf, theta=500_000.0),
        rope_pairs="neighbours",
        rope_fp32=True,
        no_rope_layers=without_rope,
        qk_unit_norm=bool(config_get(hf, "use_qk_norm", True)),
        query_scale=scale,
        attention_chunk=chunk,
        chunked_layers=chunked,
        experts=None if reasons else _experts(hf),
        names=NAMES,
        **attention_bias(hf),
    )


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


LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", read_llama4)
