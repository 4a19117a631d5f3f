"""Llama with other defaults in config.json: InternLM 3, IQuest-Coder, CWM and Helium."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""RoPE of a CWM's config.json without `rope_parameters`."""


def read_internlm3(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an InternLM 3's config.json, whose biases are `qkv_bias` and `bias`."""
    bias = bool(config_get(hf, "attention_bias", config_get(hf, "qkv_bias", False)))
    mlp_bias = bool(config_get(hf, "mlp_bias", config_get(hf, "bias", False)))
    return _llama(hf, key_heads=2, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def read_iquestcoder(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an IQuest-Coder's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    mlp_bias = bool(config_get(hf, "mlp_bias", False))
    return _llama(hf, key_heads=8, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def read_cwm(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a CWM's config.json: full attention in every fourth layer."""
    layers = range(config_require(hf, "num_hidden_layers"))
    has_rope = any(hf.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    rope = hf if has_rope else {**hf, "rope_parameters": CWM_ROPE}
    return _llama(
        hf,
        key_heads=8,
        rope_parameters=require_full_rotary(rope_parameters(rope, theta=1e6)),
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
        **sliding(hf, hf.get("sliding_window", 8192), (layer for layer in layers if layer % 4)),
    )


def read_helium(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Helium's config.json: interleaved RoPE."""
    return _llama(
        hf,
        key_heads=20,
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-8),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=100_000.0)),
        rope_pairs="neighbours",
        qkv_bias=bool(config_get(hf, "attention_bias", False)),
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
    )


def _llama(hf: HfConfig, *, key_heads: int, **specific: Any) -> DecoderConfig:
    """The DecoderConfig with these values; `key_heads` is the default of `num_key_value_heads`."""
    fields = {
        "num_key_value_heads": config_get(hf, "num_key_value_heads", key_heads),
        "head_dim": config_get(hf, "head_dim", 128),
        "rms_norm_eps": config_get(hf, "rms_norm_eps", 1e-5),
    }
    return decoder_config(hf, **{**fields, **specific})


INTERNLM3 = Family("internlm3", "LlamaForCausalLM", read_internlm3, ROLES)
IQUESTCODER = Family("iquestcoder", "LlamaForCausalLM", read_iquestcoder, ROLES)
CWM = Family("cwm", "CwmForCausalLM", read_cwm, ROLES)
HELIUM = Family("helium", "HeliumForCausalLM", read_helium, ROLES)
