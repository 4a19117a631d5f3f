"""OLMo 2: norms of the outputs of layers, not of their inputs; QK norm over whole projections."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config
from penstock.models.tp_roles import SPLIT_QK_NORM_ROLES

ROLES = SPLIT_QK_NORM_ROLES
NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OLMo 2's config.json."""
    return olmo_config(hf)


def olmo_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of an OLMo 2 or 3, with these values."""
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        input_norms=False,
        output_norms=True,
        qk_norm=True,
        qk_norm_over="projection",
        rope_fp32=True,
        qkv_bias=bias,
        o_bias=bias,
        names=NAMES,
        **specific,
    )


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", read, ROLES)
