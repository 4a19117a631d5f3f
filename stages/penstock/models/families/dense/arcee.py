"""Arcee: Llama with MLPs without a gate; optional biases everywhere."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import HfConfig, config_get, ungated_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an Arcee's config.json."""
    return ungated_config(hf, rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5))


ARCEE = Family("arcee", "ArceeForCausalLM", read, ROLES, lora_targets=UNGATED_PARTS)
