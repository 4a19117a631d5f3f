"""Ministral 3: Mistral with YaRN, and queries that are scaled by their position."""

from collections.abc import Mapping
from typing import Any

from penstock.models.decoder_config import DecoderConfig, QueryScale
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
    sliding_everywhere,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES

ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""RoPE parameters where config.json has none."""


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Ministral 3's config.json."""
    rope_entries = hf.get("rope_scaling") or hf.get("rope_parameters") or ROPE
    length = rope_entries.get("original_max_position_embeddings")
    beta = rope_entries.get("llama_4_scaling_beta")
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        # transformers derives it where it is null, and takes 128 where it is absent.
        head_dim=config_get(hf, "head_dim", _head_dim(hf) if "head_dim" in hf else 128),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope_parameters({**hf, "rope_scaling": rope_entries})),
        query_scale=None
        if beta is None
        else QueryScale(beta, length or config_require(hf, "max_position_embeddings")),
        **sliding_everywhere(hf, hf.get("sliding_window")),
    )


def _head_dim(hf: HfConfig) -> int:
    return config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")


MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", read, ROLES)
