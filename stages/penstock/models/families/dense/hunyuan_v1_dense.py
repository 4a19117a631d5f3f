"""Hunyuan, dense: QK norm after RoPE, whose base a fixed `alpha` stretches."""

from collections.abc import Mapping
from typing import Any

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = TensorNames(q_norm="query_layernorm", k_norm="key_layernorm")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Hunyuan's config.json."""
    return hunyuan_config(hf)


def hunyuan_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of a Hunyuan, dense or MoE, with these values."""
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    head_dim = config_get(hf, "head_dim", width)
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        head_dim=head_dim,
        rope_parameters=require_full_rotary(_rope(hf, head_dim)),
        qk_norm=True,
        qk_norm_after_rope=True,
        qkv_bias=bias,
        o_bias=bias,
        names=NAMES,
        **specific,
    )


def _rope(hf: HfConfig, head_dim: int) -> Mapping[str, Any]:
    """The RoPE parameters. `dynamic` with an alpha is plain RoPE with another base."""
    rope_entries = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = rope_parameters(hf)
    if rope["rope_type"] != "dynamic" or not rope_entries.get("alpha"):
        return rope
    # NTK-aware scaling: the lowest frequency, theta^(2/d - 1), is divided by alpha.
    theta = rope["rope_theta"] * rope_entries["alpha"] ** (head_dim / (head_dim - 2))
    return {"rope_type": "default", "rope_theta": theta}


HUNYUAN_V1_DENSE = Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", read, ROLES)
