"""Qwen 1.5 and Qwen 2 MoE: softmax top-k router, a shared expert with a gated output."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.moe.qwen3_moe import moe_layers
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    sliding,
    window_if_used,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(shared="shared_expert", known_to_peft=False)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen2-MoE's config.json."""
    last = config_get(hf, "max_window_layers", 28)
    windows = range(0, min(last, config_require(hf, "num_hidden_layers")), 2)
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 16),
        qkv_bias=bool(config_get(hf, "qkv_bias", True)),
        experts=_experts(hf),
        **sliding(hf, window_if_used(hf), windows),
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count, layers = config_get(hf, "num_experts", 60), moe_layers(hf)
    if not count or not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 4),
        intermediate_size=config_get(hf, "moe_intermediate_size", 1408),
        shared_intermediate_size=config_get(hf, "shared_expert_intermediate_size", 5632),
        shared_gate=True,
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", False)),
        aux_loss_coef=aux_loss_coef(hf),
        names=NAMES,
    )


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", read, ROLES)
