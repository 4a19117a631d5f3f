"""Qwen3 MoE: softmax top-k router, no shared experts."""

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    sliding_everywhere,
    window_if_used,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen3-MoE's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=_experts(hf),
        **sliding_everywhere(hf, window_if_used(hf)),
    )


def moe_layers(hf: HfConfig) -> tuple[int, ...]:
    """Indices of the MoE layers of the Qwen families."""
    step, dense = config_get(hf, "decoder_sparse_step", 1), config_get(hf, "mlp_only_layers", [])
    return tuple(
        layer
        for layer in range(config_require(hf, "num_hidden_layers"))
        if layer not in dense and (layer + 1) % step == 0
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count = config_get(hf, "num_experts", config_get(hf, "num_local_experts", 128))
    layers = moe_layers(hf)
    if not count or not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 8),
        intermediate_size=config_get(hf, "moe_intermediate_size", 768),
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", False)),
        aux_loss_coef=aux_loss_coef(hf),
    )


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, ROLES)
