"""Granite 3: Llama with factors of the embeddings, the outputs of layers, attention and logits."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Granite's config.json."""
    return granite_config(hf)


def granite_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of a Granite of any kind, with these values."""
    bias = bool(config_get(hf, "attention_bias", False))
    if "mlp_bias" not in specific:
        specific["mlp_bias"] = bool(config_get(hf, "mlp_bias", False))
    return decoder_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=config_get(hf, "embedding_multiplier", 1.0),
        residual_scale=config_get(hf, "residual_multiplier", 1.0),
        attention_scale=config_get(hf, "attention_multiplier", 1.0),
        # config.json has the divisor.
        logit_scale=1 / config_get(hf, "logits_scaling", 1.0),
        **specific,
    )


GRANITE = Family("granite", "GraniteForCausalLM", read, ROLES)
