"""GLM-4-9B: partial interleaved RoPE, biases on q, k and v; gate and up are one layer.

GLM-4-0414 has norms of the outputs of layers as well.
"""

from typing import Any

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config, rope_parameters
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM's config.json."""
    return glm_config(hf)


def read_glm4(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM-4-0414's config.json."""
    return glm_config(hf, output_norms=True)


def glm_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of a GLM, with these values."""
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 2),
        head_dim=config_get(hf, "head_dim", 128),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1.5625e-07),
        rope_parameters=rope_parameters(hf, share=0.5),
        rope_pairs="neighbours",
        qkv_bias=bool(config_get(hf, "attention_bias", True)),
        fused_gate_up=True,
        **specific,
    )


GLM = Family("glm", "GlmForCausalLM", read, ROLES, lora_targets=FUSED_GATE_UP_PARTS)
GLM4 = Family("glm4", "Glm4ForCausalLM", read_glm4, ROLES, lora_targets=FUSED_GATE_UP_PARTS)
