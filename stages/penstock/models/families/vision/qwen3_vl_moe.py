"""The language model of Qwen3-VL with experts: Qwen3-MoE whose expert weights always sum to 1, and
whose checkpoints stack the experts of a layer."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.moe.qwen3_moe import moe_layers
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, aux_loss_coef, config_get, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(gate_up_stack="experts.gate_up_proj", down_stack="experts.down_proj")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen3-VL-MoE's text_config."""
    bias = bool(config_get(hf, "attention_bias", False))
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 16),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=_experts(hf),
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count = config_get(hf, "num_experts", config_get(hf, "num_local_experts", 60))
    layers = moe_layers(hf)
    if not count or not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 4),
        intermediate_size=config_get(hf, "moe_intermediate_size", 1408),
        aux_loss_coef=aux_loss_coef(hf),
        names=NAMES,
    )


QWEN3_VL_MOE = Family("qwen3_vl_moe_text", "Qwen3VLMoeTextModel", read, ROLES)
