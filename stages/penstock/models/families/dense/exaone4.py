"""EXAONE 4: norms of the outputs of layers, not of their inputs; QK norm; sliding-window attention
in three of four layers, and no RoPE in the others."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.dense.olmo2 import NAMES
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an EXAONE 4's config.json."""
    layers = range(config_require(hf, "num_hidden_layers"))
    window, step = hf.get("sliding_window", 4096), config_get(hf, "sliding_window_pattern", 4)
    windows = sliding(hf, window, (layer for layer in layers if (layer + 1) % step))
    full = (
        []
        if window is None
        else [layer for layer in layers if layer not in windows["sliding_layers"]]
    )
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 32),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        input_norms=False,
        output_norms=True,
        qk_norm=True,
        no_rope_layers=tuple(full),
        names=NAMES,
        **windows,
    )


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", read, ROLES)
