"""Solar Open: GLM-4.5 with experts in every layer, full RoPE and no QK norm."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.moe.glm4_moe import glm_experts
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Solar Open's config.json."""
    width = config_get(hf, "moe_intermediate_size", 1280)
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        intermediate_size=width,  # all layers have experts
        head_dim=config_get(hf, "head_dim", 128),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf, theta=1e6),
        qkv_bias=bool(config_get(hf, "attention_bias", False)),
        experts=glm_experts(hf, range(config_require(hf, "num_hidden_layers")), width),
    )


SOLAR_OPEN = Family("solar_open", "SolarOpenForCausalLM", read, ROLES)
