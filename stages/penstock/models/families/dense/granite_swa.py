"""Granite with attention sinks, windows in three of four layers, and RoPE by layer."""

from collections.abc import Sequence

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.dense.granite import granite_config
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    require_full_rotary,
    rope_parameters,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Granite SWA's config.json."""
    layers = range(config_require(hf, "num_hidden_layers"))
    windows = sliding(hf, hf.get("sliding_window", 128), (layer for layer in layers if layer % 4))
    rope = require_full_rotary(rope_parameters(hf))
    thetas: Sequence[float] = config_get(hf, "layer_rope_theta", [rope["rope_theta"]] * len(layers))
    turning = [
        (index in windows["sliding_layers"], theta) for index, theta in enumerate(thetas) if theta
    ]
    full, local = (
        sorted({theta for is_local, theta in turning if is_local is kind}) for kind in (False, True)
    )
    reasons = []
    if max(len(full), len(local)) > 1:
        reasons.append("layer_rope_theta has several bases for layers of one kind; one is computed")
    full_rope, of_sliding = (
        {**rope, "rope_theta": bases[0] if bases else rope["rope_theta"]} for bases in (full, local)
    )
    return granite_config(
        hf,
        not_native=reasons,
        num_key_value_heads=config_get(
            hf,
            "num_key_value_heads",
            # transformers reads null as the number of query heads, and takes 4 where it is absent.
            4 if "num_key_value_heads" not in hf else config_require(hf, "num_attention_heads"),
        ),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=full_rope,
        sliding_rope_parameters=of_sliding,
        no_rope_layers=tuple(index for index, theta in enumerate(thetas) if not theta),
        attention_sinks=True,
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        **windows,
    )


GRANITE_SWA = Family("granite_swa", "GraniteSWAForCausalLM", read, ROLES)
