"""OLMo 2: norms of the outputs of layers, not of their inputs; QK norm over whole projections.

OLMo 3 has sliding-window attention, with its own RoPE, in three of four layers.
"""

from typing import Any

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    rope_by_layer,
    sliding,
)
from penstock.models.tp_roles import SPLIT_QK_NORM_ROLES

ROLES = SPLIT_QK_NORM_ROLES
OLMO3_THETA = 500_000.0
NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OLMo 2's config.json."""
    return olmo_config(hf)


def read_olmo3(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OLMo 3's config.json."""
    layers = range(config_require(hf, "num_hidden_layers"))
    return olmo_config(
        hf,
        **rope_by_layer(hf, theta=OLMO3_THETA, sliding_theta=OLMO3_THETA),
        **sliding(
            hf, hf.get("sliding_window", 4096), (layer for layer in layers if (layer + 1) % 4)
        ),
    )


def olmo_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of an OLMo 2 or 3, with these values."""
    bias = bool(config_get(hf, "attention_bias", False))
    eps = config_get(hf, "rms_norm_eps", 1e-5)
    own = {"rms_norm_eps": eps, "names": NAMES, **specific}
    return decoder_config(
        hf,
        input_norms=False,
        output_norms=True,
        qk_norm=True,
        qk_norm_over="projection",
        rope_fp32=True,
        qkv_bias=bias,
        o_bias=bias,
        **own,
    )


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", read, ROLES)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", read_olmo3, ROLES)
