"""VaultGemma: Gemma 2 without norms of the outputs of layers."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.gemma.gemma import ROLES
from penstock.models.families.gemma.gemma2 import gemma2_config
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a VaultGemma's config.json."""
    return gemma2_config(hf, output_norms=False)


VAULTGEMMA = Family("vaultgemma", "VaultGemmaForCausalLM", read, ROLES)
