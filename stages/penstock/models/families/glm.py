"""GLM: dense, with experts, and the language models of GLM-4.1V and GLM-4.5V; and Solar Open."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.layers import layers_from, read_routed_experts
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
)
from penstock.models.mtp_config import DEEPSEEK_MTP


def read_glm(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """GLM-4-9B: partial interleaved RoPE, biases on q, k and v; gate and up are one layer."""
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
        rope_parameters=rope_parameters(hf, share=0.5),
        rope_pairs="neighbours",
        qkv_bias=bool(config_get(hf, "attention_bias", True)),
        fused_gate_up=True,
        **specific,
    )


def read_glm4(hf: HfConfig) -> DecoderConfig:
    """GLM-4-0414: GLM with norms of the outputs of layers as well."""
    return read_glm(hf, output_norms=True)


def read_glm4v(hf: HfConfig) -> DecoderConfig:
    """The language model of GLM-4.1V, as GLM-4-0414."""
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        rope_parameters=rope_parameters(hf),
        rope_pairs="neighbours",
        # Of Glm4vTextAttention in transformers; config.json has no field for it.
        qkv_bias=True,
        fused_gate_up=True,
        output_norms=True,
    )


def read_glm4_moe(hf: HfConfig) -> DecoderConfig:
    """GLM-4.5: the router of DeepSeek V3, shared experts, partial RoPE, dense first layers."""
    return _moe_config(hf, bias=False, qk_norm=bool(config_get(hf, "use_qk_norm", False)))


def read_glm4v_moe(hf: HfConfig) -> DecoderConfig:
    """The language model of GLM-4.5V, as GLM-4.5."""
    return _moe_config(hf, bias=True, qk_norm=False)


def _moe_config(hf: HfConfig, *, bias: bool, qk_norm: bool) -> DecoderConfig:
    # `bias` is the family's default of attention_bias.
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        rope_parameters=rope_parameters(hf, share=0.5),
        qkv_bias=bool(config_get(hf, "attention_bias", bias)),
        qk_norm=qk_norm,
        experts=read_routed_experts(
            hf, layers_from(hf, 1), count=128, chosen=8, width=1408, scale=1.0
        ),
    )


def read_solar_open(hf: HfConfig) -> DecoderConfig:
    """Solar Open: GLM-4.5 with experts in every layer, full RoPE and no QK norm."""
    layers = range(config_require(hf, "num_hidden_layers"))
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        # There are no dense layers, and no size of one in config.json.
        intermediate_size=config_get(hf, "moe_intermediate_size", 1280),
        rope_parameters=rope_parameters(hf, theta=1e6),
        qkv_bias=bool(config_get(hf, "attention_bias", False)),
        experts=read_routed_experts(hf, layers, count=128, chosen=8, width=1280, scale=1.0),
    )


GLM = Family("glm", "GlmForCausalLM", read_glm, lora_targets=FUSED_GATE_UP_PARTS)
GLM4 = Family("glm4", "Glm4ForCausalLM", read_glm4, lora_targets=FUSED_GATE_UP_PARTS)
GLM4V = Family("glm4v_text", "Glm4vTextModel", read_glm4v, lora_targets=FUSED_GATE_UP_PARTS)
GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", read_glm4_moe, mtp=DEEPSEEK_MTP)
GLM4V_MOE = Family("glm4v_moe_text", "Glm4vMoeTextModel", read_glm4v_moe)
SOLAR_OPEN = Family("solar_open", "SolarOpenForCausalLM", read_solar_open)
