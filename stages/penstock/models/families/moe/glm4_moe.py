"""GLM-4.5 and related models: grouped sigmoid router with a selection bias, shared experts, partial
RoPE (partial_rotary_factor 0.5), dense first layers."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
)
from penstock.models.mtp_config import DEEPSEEK_MTP
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM-4-MoE's config.json."""
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf, share=0.5),
        qkv_bias=bool(config_get(hf, "attention_bias", False)),
        qk_norm=bool(config_get(hf, "use_qk_norm", False)),
        experts=glm_experts(hf, sparse_layers(hf), config_get(hf, "moe_intermediate_size", 1408)),
    )


def sparse_layers(hf: HfConfig) -> range:
    """The layers with experts: all but the first few."""
    first = config_get(hf, "first_k_dense_replace", 1)
    return range(first, config_require(hf, "num_hidden_layers"))


def glm_experts(hf: HfConfig, layers: range, width: int) -> ExpertsConfig | None:
    """The experts of these layers, which have this intermediate size."""
    count = config_get(hf, "n_routed_experts", config_get(hf, "num_local_experts", 128))
    if not layers:
        return None
    return ExpertsConfig(
        layers=tuple(layers),
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=width * config_get(hf, "n_shared_experts", 1),
        scoring="sigmoid",
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", True)),
        num_groups=config_get(hf, "n_group", 1),
        groups_per_token=config_get(hf, "topk_group", 1),
        scale=config_get(hf, "routed_scaling_factor", 1.0),
        selection_bias=(count,),
    )


GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", read, ROLES, mtp=DEEPSEEK_MTP)
