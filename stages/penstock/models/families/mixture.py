"""Families with experts that are like no dense family here: Mixtral, MiniMax M2, gpt-oss, dots.llm1
and Mellum."""

from collections.abc import Mapping
from typing import Any

from penstock.models.decoder_config import ClampedGate, DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.layers import (
    layers_from,
    read_count,
    read_experts,
    read_routed_experts,
    sparse_layers,
)
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import (
    HfConfig,
    attention_bias,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    full_rope,
    rope_by_layer,
    rope_parameters,
    sliding,
    sliding_everywhere,
)
from penstock.models.tp_roles import SPLIT_QK_NORM_ROLES

LOCAL = ("num_local_experts", "num_experts")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
MINIMAX_NAMES = ExpertNames(
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    selection_bias="e_score_correction_bias",
)
GPT_OSS_NAMES = ExpertNames(
    router="router", gate_up_stack="experts.gate_up_proj", down_stack="experts.down_proj"
)
# RoPE parameters where config.json has none.
GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_mixtral(hf: HfConfig) -> DecoderConfig:
    """Mixtral: experts in every layer, softmax top-k router, its own tensor names."""
    layers, coefficient = range(config_require(hf, "num_hidden_layers")), aux_loss_coef(hf)
    kwargs = {"aux_loss_coef": coefficient, "names": MIXTRAL_NAMES}
    return decoder_config(
        hf,
        not_native=_unsupported_noise(hf),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        rope_parameters=full_rope(hf, theta=1e6),
        experts=read_experts(hf, layers, LOCAL, count=8, chosen=2, **kwargs),
        **sliding_everywhere(hf, config_get(hf, "sliding_window", None)),
    )


def _unsupported_noise(hf: HfConfig) -> list[str]:
    noise = config_get(hf, "router_jitter_noise", 0.0)
    return [f"router_jitter_noise is {noise}; routing without noise is computed"] if noise else []


def read_minimax_m2(hf: HfConfig) -> DecoderConfig:
    """MiniMax M2: experts in every layer, sigmoid router with a selection bias, QK norm over whole
    projections, partial RoPE."""
    faults, reasons = [], _unsupported_noise(hf)
    if aux_loss_coef(hf):
        faults.append(
            "output_router_logits is true: transformers' load-balancing loss is of a softmax that "
            "this router does not compute; write false, and train.moe_aux_loss_coef for a loss of "
            "the sigmoid scores"
        )
    head_dim = config_get(hf, "head_dim", 128)
    # Published files have `rotary_dim` instead of `partial_rotary_factor`.
    share = config_get(hf, "rotary_dim", head_dim) / head_dim
    return decoder_config(
        hf,
        unsupported=faults,
        not_native=reasons,
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        rope_parameters=rope_parameters(hf, theta=5e6, share=share),
        qk_norm=True,
        qk_norm_over="projection",
        experts=read_experts(
            hf,
            range(config_require(hf, "num_hidden_layers")),
            LOCAL,
            count=256,
            chosen=8,
            scoring="sigmoid",
            selection_bias=(read_count(hf, LOCAL, 256),),
            names=MINIMAX_NAMES,
        ),
    )


def read_gpt_oss(hf: HfConfig) -> DecoderConfig:
    """gpt-oss: sliding-window attention in every second layer, attention sinks and biases in all;
    experts in every layer, with biases and a clamped gated activation."""
    has_rope = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = full_rope(hf if has_rope else {**hf, "rope_parameters": GPT_OSS_ROPE}, theta=150_000.0)
    num_layers = config_require(hf, "num_hidden_layers")
    experts = read_experts(
        hf,
        range(num_layers),
        LOCAL,
        count=128,
        chosen=4,
        router_bias=True,
        aux_loss_coef=aux_loss_coef(hf),
        clamped=ClampedGate(
            alpha=config_get(hf, "swiglu_alpha", 1.702),
            limit=config_get(hf, "swiglu_limit", 7.0),
        ),
        names=GPT_OSS_NAMES,
    )
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
        rope_parameters=rope,
        attention_sinks=True,
        experts=experts,
        **attention_bias(hf, default=True),
        **sliding(hf, hf.get("sliding_window", 128), range(0, num_layers, 2)),
    )


def read_dots1(hf: HfConfig) -> DecoderConfig:
    """dots.llm1: the router of DeepSeek V3, shared experts, QK norm by head."""
    windows = range(
        config_get(hf, "max_window_layers", 62), config_require(hf, "num_hidden_layers")
    )
    return decoder_config(
        hf,
        qk_norm=True,
        experts=_dots1_experts(hf),
        **attention_bias(hf),
        **sliding(hf, hf.get("sliding_window", 4096), windows),
    )


def _dots1_experts(hf: HfConfig) -> ExpertsConfig | None:
    if not (layers := layers_from(hf, 0)):
        return None
    return read_routed_experts(
        hf,
        layers,
        ("n_routed_experts",),
        count=config_require(hf, "n_routed_experts"),
        chosen=config_require(hf, "num_experts_per_tok"),
        width=1408,
        shared=config_require(hf, "n_shared_experts"),
        normalized=False,
        scale=1.0,
    )


def read_mellum(hf: HfConfig) -> DecoderConfig:
    """Mellum: Qwen3 MoE with windows in some layers, which have their own RoPE."""
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 4, "head_dim": 128},
        qk_norm=True,
        experts=read_experts(
            hf,
            sparse_layers(hf, dense=0),
            ("num_experts", "num_local_experts"),
            count=64,
            chosen=8,
            width=896,
            normalized=True,
            aux_loss_coef=aux_loss_coef(hf),
        ),
        **attention_bias(hf),
        **rope_by_layer(hf, theta=500_000.0, sliding_theta=10_000.0),
        **sliding(hf, hf.get("sliding_window", 1024), ()),
    )


MIXTRAL = Family("mixtral", "MixtralForCausalLM", read_mixtral)
MINIMAX_M2 = Family("minimax_m2", "MiniMaxM2ForCausalLM", read_minimax_m2, SPLIT_QK_NORM_ROLES)
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", read_gpt_oss, lora_targets=FUSED_GATE_UP_PARTS)
DOTS1 = Family("dots1", "Dots1ForCausalLM", read_dots1)
MELLUM = Family("mellum", "MellumForCausalLM", read_mellum)
