"""Llama 2 and 3: optional biases everywhere, no QK norm."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Llama's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    mlp_bias = bool(config_get(hf, "mlp_bias", False))
    return decoder_config(hf, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


LLAMA = Family("llama", "LlamaForCausalLM", read, ROLES)
