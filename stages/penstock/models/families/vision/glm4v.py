"""The language models of GLM-4.1V, as GLM-4-0414, and of GLM-4.5V, as GLM-4.5."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.moe.glm4_moe import glm_experts, sparse_layers
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config, rope_parameters
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM-4.1V's text_config."""
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 2),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf),
        rope_pairs="neighbours",
        qkv_bias=True,
        fused_gate_up=True,
        output_norms=True,
    )


def read_moe(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM-4.5V's text_config."""
    width = config_get(hf, "moe_intermediate_size", 1408)
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf, share=0.5),
        qkv_bias=bool(config_get(hf, "attention_bias", True)),
        experts=glm_experts(hf, sparse_layers(hf), width),
    )


GLM4V = Family("glm4v_text", "Glm4vTextModel", read, ROLES, lora_targets=FUSED_GATE_UP_PARTS)
GLM4V_MOE = Family("glm4v_moe_text", "Glm4vMoeTextModel", read_moe, ROLES)
