"""OLMo: LayerNorm without weights and biases."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OLMo's config.json."""
    reasons = []
    if (limit := config_get(hf, "clip_qkv", None)) is not None:
        reasons.append(f"clip_qkv is {limit}; queries, keys and values without limits are computed")
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        not_native=reasons,
        norm="layer_plain",
        rms_norm_eps=1e-5,
        rope_fp32=True,
        qkv_bias=bias,
        o_bias=bias,
    )


OLMO = Family("olmo", "OlmoForCausalLM", read, ROLES)
