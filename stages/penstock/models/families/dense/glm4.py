"""GLM-4-0414: GLM with norms of the outputs of layers as well."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.dense.glm import ROLES, glm_config
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import HfConfig


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM-4's config.json."""
    return glm_config(hf, output_norms=True)


GLM4 = Family("glm4", "Glm4ForCausalLM", read, ROLES, lora_targets=FUSED_GATE_UP_PARTS)
