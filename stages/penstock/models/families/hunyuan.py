"""Hunyuan, dense and with experts, and HY 3."""

from collections.abc import Mapping
from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig, TensorNames
from penstock.models.families.layers import read_experts, sparse_layers
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    attention_bias,
    config_get,
    config_require,
    decoder_config,
    full_rope,
    require_full_rotary,
    rope_parameters,
)

NAMES = TensorNames(q_norm="query_layernorm", k_norm="key_layernorm")
EXPERT_NAMES = ExpertNames(router="gate.wg", shared="shared_mlp")
HY_V3_NAMES = ExpertNames(router="router.gate", selection_bias="expert_bias", shared="shared_mlp")


def read_hunyuan(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """Hunyuan: QK norm after RoPE, whose base a fixed `alpha` stretches."""
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    head_dim = config_get(hf, "head_dim", width)
    return decoder_config(
        hf,
        defaults={"rms_norm_eps": 1e-5},
        head_dim=head_dim,
        rope_parameters=require_full_rotary(_rope(hf, head_dim)),
        qk_norm=True,
        qk_norm_after_rope=True,
        names=NAMES,
        **attention_bias(hf),
        **specific,
    )


def _rope(hf: HfConfig, head_dim: int) -> Mapping[str, Any]:
    # The RoPE parameters. `dynamic` with an alpha is plain RoPE with another base.
    entries = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = rope_parameters(hf)
    if rope["rope_type"] != "dynamic" or not entries.get("alpha"):
        return rope
    # NTK-aware scaling: the lowest frequency, theta^(2/d - 1), is divided by alpha.
    theta = rope["rope_theta"] * entries["alpha"] ** (head_dim / (head_dim - 2))
    return {"rope_type": "default", "rope_theta": theta}


def read_moe(hf: HfConfig) -> DecoderConfig:
    """Hunyuan MoE: experts in every layer, fp32 softmax router, a shared expert."""
    width, reasons = config_require(hf, "intermediate_size"), []
    experts = ExpertsConfig(
        layers=tuple(range(config_require(hf, "num_hidden_layers"))),
        num_experts=_of_all_layers(hf, "num_experts", reasons),
        experts_per_token=_of_all_layers(hf, "moe_topk", reasons),
        intermediate_size=width,
        shared_intermediate_size=width,
        fp32_router=True,
        names=EXPERT_NAMES,
    )
    return read_hunyuan(hf, not_native=reasons, experts=experts)


def _of_all_layers(hf: HfConfig, name: str, reasons: list[str]) -> Any:
    # A number, 1 by default, that may be given for each layer.
    value = config_get(hf, name, 1)
    if not isinstance(value, list):
        return value
    if len(set(value)) > 1:
        reasons.append(f"{name} differs between layers; one for all layers is computed")
    return value[0] if value else None


def read_hy_v3(hf: HfConfig) -> DecoderConfig:
    """HY 3: sigmoid router with a selection bias, shared experts, a dense first layer; QK norm by
    head."""
    reasons = []
    if config_get(hf, "mlp_bias", False):
        reasons.append("mlp_bias is true; MLPs without biases are computed")
    count = config_get(hf, "num_experts", 192)
    width = config_get(hf, "moe_intermediate_size", 1536)
    return decoder_config(
        hf,
        not_native=reasons,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.006,
        },
        rope_parameters=full_rope(hf, theta=11_158_840.0),
        qk_norm=True,
        experts=read_experts(
            hf,
            sparse_layers(hf, dense=1),
            count=count,
            chosen=8,
            width=width,
            shared_intermediate_size=width * config_get(hf, "num_shared_experts", 1),
            scoring="sigmoid",
            scale=config_get(hf, "router_scaling_factor", 2.826),
            selection_bias=(count,),
            names=HY_V3_NAMES,
        ),
        **attention_bias(hf),
    )


HUNYUAN_V1_DENSE = Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", read_hunyuan)
HUNYUAN_V1_MOE = Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", read_moe)
HY_V3 = Family("hy_v3", "HYV3ForCausalLM", read_hy_v3)
