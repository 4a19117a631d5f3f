"""OLMo 3: OLMo 2 with sliding-window attention, and its own RoPE, in three of four layers."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.dense.olmo2 import ROLES, olmo_config
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_require, rope_by_layer, sliding

THETA = 500_000.0


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OLMo 3's config.json."""
    layers = range(config_require(hf, "num_hidden_layers"))
    return olmo_config(
        hf,
        **rope_by_layer(hf, theta=THETA, sliding_theta=THETA),
        **sliding(hf, hf.get("sliding_window", 4096), (at for at in layers if (at + 1) % 4)),
    )


OLMO3 = Family("olmo3", "Olmo3ForCausalLM", read, ROLES)
