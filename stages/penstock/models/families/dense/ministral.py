"""Ministral: Mistral with sliding-window attention in some layers."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Ministral's config.json."""
    every_layer = range(config_require(hf, "num_hidden_layers"))
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        **sliding(hf, hf.get("sliding_window", 4096), every_layer),
    )


MINISTRAL = Family("ministral", "MinistralForCausalLM", read, ROLES)
