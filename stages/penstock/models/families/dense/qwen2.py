"""Qwen2 and Qwen2.5: biases on q, k and v only."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, decoder_config, sliding_after_max_window_layers
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen2's config.json, which has no field for its biases."""
    return decoder_config(hf, qkv_bias=True, **sliding_after_max_window_layers(hf))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", read, ROLES)
