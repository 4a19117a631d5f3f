"""SmolLM3: Llama without RoPE in some layers, every fourth by default."""

from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    require_full_rotary,
    rope_parameters,
    sliding,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a SmolLM3's config.json."""
    bias = bool(config_get(hf, "attention_bias", False))
    without_rope = _layers_without_rope(hf)
    windowed = without_rope if config_get(hf, "use_sliding_window", False) else ()
    return decoder_config(
        hf,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 4),
        rope_parameters=require_full_rotary(rope_parameters(hf, theta=2e6)),
        no_rope_layers=without_rope,
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
        **sliding(hf, hf.get("sliding_window"), windowed),
    )


def _layers_without_rope(hf: HfConfig) -> tuple[int, ...]:
    """Those that `no_rope_layers` marks with 0; 1 marks those with RoPE."""
    layers = range(config_require(hf, "num_hidden_layers"))
    marks = config_get(hf, "no_rope_layers", None)
    if marks is None:
        step = config_get(hf, "no_rope_layer_interval", 4)
        return tuple(layer for layer in layers if (layer + 1) % step == 0)
    if not isinstance(marks, Sequence) or len(marks) < len(layers):
        raise ConfigError(
            f"the model's no_rope_layers (config.json) is {marks!r}; it must have a number for "
            f"each of the {len(layers)} layers."
        )
    return tuple(layer for layer in layers if not marks[layer])


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", read, ROLES)
