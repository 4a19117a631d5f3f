"""HY 3 (Hunyuan): sigmoid router with a selection bias, shared experts, a dense first layer; QK
norm by head."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.moe.exaone_moe import sparse_layers
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
NAMES = ExpertNames(router="router.gate", selection_bias="expert_bias", shared="shared_mlp")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a HY 3's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    reasons = []
    if config_get(hf, "mlp_bias", False):
        reasons.append("mlp_bias is true; MLPs without biases are computed")
    return decoder_config(
        hf,
        not_native=reasons,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        head_dim=config_get(hf, "head_dim", 128),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=11_158_840.0)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        initializer_range=config_get(hf, "initializer_range", 0.006),
        experts=_experts(hf),
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count, layers = config_get(hf, "num_experts", 192), sparse_layers(hf, dense=1)
    width = config_get(hf, "moe_intermediate_size", 1536)
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=width * config_get(hf, "num_shared_experts", 1),
        scoring="sigmoid",
        scale=config_get(hf, "router_scaling_factor", 2.826),
        selection_bias=(count,),
        names=NAMES,
    )


HY_V3 = Family("hy_v3", "HYV3ForCausalLM", read, ROLES)
