"""Youtu-LLM: DeepSeek V3's latent attention without experts."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.latent.fields import (
    LORA_TARGETS,
    ROLES,
    latent_attention,
    rotary_pairs,
    unsupported_attention,
)
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Youtu-LLM's config.json."""
    width = config_require(hf, "hidden_size")
    return decoder_config(
        hf,
        unsupported=unsupported_attention(hf),
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        initializer_range=config_get(hf, "initializer_range", 2.0 / (5.0 * width) ** 0.5),
        **latent_attention(hf, ranks=(1536, 512), head=(128, 64, 128)),
        **rotary_pairs(hf),
    )


YOUTU = Family("youtu", "YoutuForCausalLM", read, ROLES, lora_targets=LORA_TARGETS)
