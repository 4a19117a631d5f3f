"""Gemma: RMSNorm with 1 + weight, scaled embeddings, GeGLU."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
GELU = "gelu_pytorch_tanh"


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Gemma's config.json."""
    # Old files say `gelu` and mean its approximation.
    exact = config_get(hf, "hidden_act", GELU) == "gelu"
    return gemma_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 16),
        **({"activation": "gelu_tanh"} if exact else {}),
    )


def gemma_config(hf: HfConfig, *, hidden_act: str = "hidden_act", **specific: Any) -> DecoderConfig:
    """The DecoderConfig of a Gemma of any version, with these values. `hidden_act` is the name of
    that field in its files."""
    reasons = [*specific.pop("not_native", ())]
    if (kind := config_get(hf, "use_bidirectional_attention", False)) not in (False, "vision"):
        reasons.append(f"use_bidirectional_attention is {kind!r}; causal attention is computed")
    bias = bool(config_get(hf, "attention_bias", False))
    fields = {
        "num_key_value_heads": config_get(hf, "num_key_value_heads", 4),
        "head_dim": config_get(hf, "head_dim", 256),
        "norm": "rms_1p",
        "embedding_scale": config_require(hf, "hidden_size") ** 0.5,
        "rounds_embedding_scale": True,
        "tie_word_embeddings": bool(config_get(hf, "tie_word_embeddings", True)),
        "qkv_bias": bias,
        "o_bias": bias,
    }
    named = {"hidden_act": hidden_act}
    return decoder_config(
        hf, not_native=reasons, hidden_act=GELU, named=named, **{**fields, **specific}
    )


GEMMA = Family("gemma", "GemmaForCausalLM", read, ROLES)
