"""Nemotron: LayerNorm with 1 + weight, partial RoPE, MLPs without a gate, optional biases."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import HfConfig, config_get, rope_parameters, ungated_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Nemotron's config.json."""
    return ungated_config(
        hf,
        norm="layer_1p",
        rms_norm_eps=config_get(hf, "norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf, share=0.5),
        initializer_range=config_get(hf, "initializer_range", 0.0134),
    )


NEMOTRON = Family("nemotron", "NemotronForCausalLM", read, ROLES, lora_targets=UNGATED_PARTS)
