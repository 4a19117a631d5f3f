"""Qwen3, dense: QK norm (RMSNorm per head); head_dim is its own field."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    decoder_config,
    sliding_after_max_window_layers,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen3's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        head_dim=config_get(hf, "head_dim", 128),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        **sliding_after_max_window_layers(hf),
    )


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read, ROLES)
