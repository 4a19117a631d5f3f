"""Mellum: Qwen3 MoE with windows in some layers, which have their own RoPE."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.families.moe.exaone_moe import sparse_layers
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    decoder_config,
    rope_by_layer,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Mellum's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 4),
        head_dim=config_get(hf, "head_dim", 128),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=_experts(hf),
        **rope_by_layer(hf, theta=500_000.0, sliding_theta=10_000.0),
        **sliding(hf, hf.get("sliding_window", 1024), ()),
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    layers = sparse_layers(hf, dense=0)
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=config_get(hf, "num_experts", config_get(hf, "num_local_experts", 64)),
        experts_per_token=config_get(hf, "num_experts_per_tok", 8),
        intermediate_size=config_get(hf, "moe_intermediate_size", 896),
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", True)),
        aux_loss_coef=aux_loss_coef(hf),
    )


MELLUM = Family("mellum", "MellumForCausalLM", read, ROLES)
