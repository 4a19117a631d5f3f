"""gpt-oss: sliding-window attention in every second layer, attention sinks and biases in all;
experts in every layer, with biases and a clamped gated activation."""

from collections.abc import Mapping
from typing import Any

from penstock.models.decoder_config import ClampedGate, DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(
    router="router", gate_up_stack="experts.gate_up_proj", down_stack="experts.down_proj"
)
THETA = 150_000.0

ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE parameters where config.json has none."""


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a gpt-oss's config.json."""
    bias = bool(config_get(hf, "attention_bias", True))
    given_rope = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = rope_parameters(hf if given_rope else {**hf, "rope_parameters": ROPE}, theta=THETA)
    num_layers = config_require(hf, "num_hidden_layers")
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        head_dim=config_get(hf, "head_dim", 64),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope),
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        experts=ExpertsConfig(
            layers=tuple(range(num_layers)),
            num_experts=config_get(hf, "num_local_experts", config_get(hf, "num_experts", 128)),
            experts_per_token=config_get(hf, "num_experts_per_tok", 4),
            intermediate_size=config_require(hf, "intermediate_size"),
            router_bias=True,
            aux_loss_coef=aux_loss_coef(hf),
            clamped=ClampedGate(
                alpha=config_get(hf, "swiglu_alpha", 1.702),
                limit=config_get(hf, "swiglu_limit", 7.0),
            ),
            names=NAMES,
        ),
        **sliding(hf, hf.get("sliding_window", 128), range(0, num_layers, 2)),
    )


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", read, ROLES, lora_targets=FUSED_GATE_UP_PARTS)
