"""Cohere (Command R): parallel blocks, LayerNorm without bias, interleaved RoPE, scaled logits.

Cohere 2 has sliding windows in three of four layers, and no RoPE in the others.
"""

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


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Cohere's config.json."""
    reasons = []
    if config_get(hf, "use_qk_norm", False):
        reasons.append("use_qk_norm is true, a LayerNorm of each head; none is computed")
    return cohere_config(hf, theta=500_000.0, not_native=reasons)


def read_cohere2(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Cohere 2's config.json."""
    layers = range(config_require(hf, "num_hidden_layers"))
    step = config_get(hf, "sliding_window_pattern", 4)
    windows = sliding(
        hf, hf.get("sliding_window", 4096), (layer for layer in layers if (layer + 1) % step)
    )
    full = tuple(layer for layer in layers if layer not in windows["sliding_layers"])
    return cohere_config(hf, theta=10_000.0, no_rope_layers=full, **windows)


def cohere_config(hf: HfConfig, *, theta: float, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of either, with these values."""
    bias = bool(config_get(hf, "attention_bias", False))
    fields: dict[str, Any] = {
        "norm": "layer_unbiased",
        "rms_norm_eps": config_get(hf, "layer_norm_eps", 1e-5),
    }
    return decoder_config(
        hf,
        parallel_block=True,
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=theta)),
        rope_pairs="neighbours",
        qkv_bias=bias,
        o_bias=bias,
        logit_scale=config_get(hf, "logit_scale", 0.0625),
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        **{**fields, **specific},
    )


COHERE = Family("cohere", "CohereForCausalLM", read, ROLES)
COHERE2 = Family("cohere2", "Cohere2ForCausalLM", read_cohere2, ROLES)
