"""OLMoE: experts in every layer, softmax top-k router, QK norm over whole projections."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
)
from penstock.models.tp_roles import SPLIT_QK_NORM_ROLES

ROLES = SPLIT_QK_NORM_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OLMoE's config.json."""
    reasons = []
    if (limit := hf.get("clip_qkv")) is not None:
        reasons.append(f"clip_qkv is {limit}; queries, keys and values without limits are computed")
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        not_native=reasons,
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_over="projection",
        experts=ExpertsConfig(
            layers=tuple(range(config_require(hf, "num_hidden_layers"))),
            num_experts=config_get(hf, "num_experts", config_get(hf, "num_local_experts", 64)),
            experts_per_token=config_get(hf, "num_experts_per_tok", 8),
            intermediate_size=config_require(hf, "intermediate_size"),
            norm_topk_prob=bool(config_get(hf, "norm_topk_prob", False)),
            aux_loss_coef=aux_loss_coef(hf, 0.01),
        ),
    )


OLMOE = Family("olmoe", "OlmoeForCausalLM", read, ROLES)
