"""Mixtral: experts in every layer, softmax top-k router, its own tensor names."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
    sliding_everywhere,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Mixtral's config.json."""
    reasons = []
    if noise := config_get(hf, "router_jitter_noise", 0.0):
        reasons.append(f"router_jitter_noise is {noise}; routing without noise is computed")
    return decoder_config(
        hf,
        not_native=reasons,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=1e6)),
        experts=ExpertsConfig(
            layers=tuple(range(config_require(hf, "num_hidden_layers"))),
            num_experts=config_get(hf, "num_local_experts", config_get(hf, "num_experts", 8)),
            experts_per_token=config_get(hf, "num_experts_per_tok", 2),
            intermediate_size=config_require(hf, "intermediate_size"),
            aux_loss_coef=aux_loss_coef(hf),
            names=NAMES,
        ),
        **sliding_everywhere(hf, config_get(hf, "sliding_window", None)),
    )


MIXTRAL = Family("mixtral", "MixtralForCausalLM", read, ROLES)
