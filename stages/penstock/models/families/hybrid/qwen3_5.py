"""The language models of Qwen3.5, dense and with experts: Qwen3-Next with separate input
projections of linear attention, and experts in every layer or in none."""

from dataclasses import replace

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.hybrid.fields import ROLES, gated_delta_layers, unsupported_activation
from penstock.models.family import LINEAR_PARTS, Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
)
from penstock.models.mtp_config import QWEN3_NEXT_MTP

MTP = replace(QWEN3_NEXT_MTP, count="mtp_num_hidden_layers")

NAMES = ExpertNames(shared="shared_expert", known_to_peft=False)

LORA_TARGETS = (*LINEAR_PARTS, "in_proj_qkv", "in_proj_z", "out_proj")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a dense Qwen3.5's config.json, or that of its text model."""
    return decoder_config(
        hf, not_native=unsupported_activation(hf), **gated_delta_layers(hf, keys=4, fused=False)
    )


def read_moe(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen3.5's with experts."""
    width = config_get(hf, "moe_intermediate_size", 512)
    return decoder_config(
        hf,
        not_native=unsupported_activation(hf),
        # There are no dense layers, and no size of one in config.json.
        intermediate_size=width,
        experts=ExpertsConfig(
            layers=tuple(range(config_require(hf, "num_hidden_layers"))),
            num_experts=config_get(hf, "num_experts", 256),
            experts_per_token=config_get(hf, "num_experts_per_tok", 8),
            intermediate_size=width,
            shared_intermediate_size=config_get(hf, "shared_expert_intermediate_size", 512),
            shared_gate=True,
            norm_topk_prob=True,
            aux_loss_coef=aux_loss_coef(hf),
            names=NAMES,
        ),
        **gated_delta_layers(hf, keys=2, fused=False),
    )


QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", read, ROLES, lora_targets=LORA_TARGETS, mtp=MTP
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    read_moe,
    ROLES,
    lora_targets=LORA_TARGETS,
    mtp=MTP,
)
