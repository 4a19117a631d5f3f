"""Jais 2: LayerNorm, full RoPE, MLPs without a gate, optional biases."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import HfConfig, config_get, ungated_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Jais 2's config.json."""
    eps = config_get(hf, "layer_norm_eps", 1e-5)
    return ungated_config(hf, biased=True, norm="layer", rms_norm_eps=eps)


JAIS2 = Family("jais2", "Jais2ForCausalLM", read, ROLES, lora_targets=UNGATED_PARTS)
