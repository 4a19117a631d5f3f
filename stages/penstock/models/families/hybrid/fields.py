"""Reads what the families with Gated DeltaNet layers share in config.json."""

from typing import Any

from penstock.core.errors import ConfigError
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    SILU,
    HfConfig,
    config_get,
    config_require,
    rope_parameters,
)
from penstock.models.linear_config import FIELDS, MODEL_TYPES, GatedDeltaConfig
from penstock.models.tp_roles import LINEAR_ATTENTION_ROLES

ROLES = LINEAR_ATTENTION_ROLES

DEFAULTS = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4}
"""Transformers' defaults."""


def linear_key_heads(hf: HfConfig) -> int:
    """Key heads of linear attention; 0 for a model without it."""
    if hf.get("model_type") not in MODEL_TYPES or not linear_layers(hf):
        return 0
    return config_get(hf, FIELDS["key_heads"], DEFAULTS["key_heads"])


def linear_value_features(hf: HfConfig) -> int:
    """Features of all value heads of linear attention; 0 for a model without it."""
    if not linear_key_heads(hf):
        return 0
    heads, width = (
        config_get(hf, FIELDS[name], DEFAULTS[name]) for name in ("value_heads", "value_dim")
    )
    return heads * width


def gated_delta_layers(hf: HfConfig, *, keys: int, fused: bool) -> dict[str, Any]:
    """The fields of a DecoderConfig with layers of Gated DeltaNet and of gated softmax attention.
    `keys` is the family's default of num_key_value_heads."""
    bias = bool(config_get(hf, "attention_bias", False))
    sizes = {name: config_get(hf, field, DEFAULTS[name]) for name, field in FIELDS.items()}
    return {
        "norm": "rms_1p",
        "head_dim": config_get(hf, "head_dim", 256),
        "num_key_value_heads": config_get(hf, "num_key_value_heads", keys),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "output_gate": True,
        "rope_parameters": rope_parameters(hf, share=0.25),
        "linear": GatedDeltaConfig(**sizes, fused=fused),
        "linear_layers": linear_layers(hf),
    }


def linear_layers(hf: HfConfig) -> tuple[int, ...]:
    """The layers with linear attention: those of `layer_types`, or all but each
    `full_attention_interval`-th."""
    count = config_require(hf, "num_hidden_layers")
    every = config_get(hf, "full_attention_interval", 4)
    types = config_get(
        hf, "layer_types", [FULL if (at + 1) % every == 0 else LINEAR for at in range(count)]
    )
    if len(types) < count:
        raise ConfigError(
            f"the model's layer_types (config.json) has {len(types)} entries, and "
            f"num_hidden_layers is {count}. Correct the config.json that model.config_path names."
        )
    return tuple(at for at, kind in enumerate(types[:count]) if kind == LINEAR)


def unsupported_activation(hf: HfConfig) -> tuple[str, ...]:
    """`hidden_act` is that of the convolutions too, which have SiLU."""
    activation = config_get(hf, "hidden_act", "silu")
    if activation in SILU:
        return ()
    return (f"hidden_act is {activation!r}; {', '.join(SILU)} are computed after convolutions",)
