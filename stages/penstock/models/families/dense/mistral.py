"""Mistral: Llama with sliding-window attention in every layer, or in none."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config, sliding_everywhere
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Mistral's config.json."""
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        **sliding_everywhere(hf, hf.get("sliding_window", 4096)),
    )


MISTRAL = Family("mistral", "MistralForCausalLM", read, ROLES)
