"""FlexOlmo: attention and norms of OLMo 2, with experts in every layer as in OLMoE."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.families.dense.olmo2 import OLMO3_THETA, olmo_config
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.tp_roles import SPLIT_QK_NORM_ROLES

ROLES = SPLIT_QK_NORM_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a FlexOlmo's config.json."""
    return olmo_config(
        hf,
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-6),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=OLMO3_THETA)),
        experts=ExpertsConfig(
            layers=tuple(range(config_require(hf, "num_hidden_layers"))),
            num_experts=config_get(hf, "num_experts", 7),
            experts_per_token=config_get(hf, "num_experts_per_tok", 5),
            intermediate_size=config_require(hf, "intermediate_size"),
            norm_topk_prob=bool(config_get(hf, "norm_topk_prob", False)),
            aux_loss_coef=aux_loss_coef(hf, 0.01),
        ),
    )


FLEX_OLMO = Family("flex_olmo", "FlexOlmoForCausalLM", read, ROLES)
