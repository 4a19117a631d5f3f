"""Granite MoE: experts in every layer, softmax top-k router; checkpoints stack the experts. The
rest is as in Granite."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(
    block="block_sparse_moe",
    router="router.layer",
    gate_up_stack="input_linear.weight",
    down_stack="output_linear.weight",
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GraniteMoe's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=config_get(hf, "embedding_multiplier", 1.0),
        residual_scale=config_get(hf, "residual_multiplier", 1.0),
        attention_scale=config_get(hf, "attention_multiplier", 1.0),
        logit_scale=1 / config_get(hf, "logits_scaling", 1.0),
        experts=ExpertsConfig(
            layers=tuple(range(config_require(hf, "num_hidden_layers"))),
            num_experts=config_get(hf, "num_local_experts", 8),
            experts_per_token=config_get(hf, "num_experts_per_tok", 2),
            intermediate_size=config_require(hf, "intermediate_size"),
            aux_loss_coef=aux_loss_coef(hf),
            names=NAMES,
        ),
    )


GRANITEMOE = Family(
    "granitemoe", "GraniteMoeForCausalLM", read, ROLES, lora_targets=FUSED_GATE_UP_PARTS
)
