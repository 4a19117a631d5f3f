"""ERNIE 4.5, dense: interleaved RoPE (GPT-J style)."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    decoder_config,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
THETA = 500_000.0


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an ERNIE 4.5's config.json."""
    bias = bool(config_get(hf, "use_bias", False))
    return decoder_config(
        hf,
        head_dim=config_get(hf, "head_dim", 128),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=THETA)),
        rope_pairs="neighbours",
        rope_fp32=True,
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", read, ROLES)
