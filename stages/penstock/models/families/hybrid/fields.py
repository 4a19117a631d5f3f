"""Reads what hybrids share in config.json, and those of them with Gated DeltaNet layers."""

from collections.abc import Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    SILU,
    HfConfig,
    config_get,
    config_require,
    layer_types,
    rope_parameters,
)
from penstock.models.linear_config import FIELDS, GatedDeltaConfig
from penstock.models.tp_roles import LINEAR_ATTENTION_ROLES

ROLES = LINEAR_ATTENTION_ROLES

DEFAULTS = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4}
"""Transformers' defaults."""


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
        "linear_layers": layers_of_kind(hf, LINEAR, _types_by_interval(hf)),
    }


def _types_by_interval(hf: HfConfig) -> list[str]:
    """Linear attention in all layers but each `full_attention_interval`-th."""
    every = config_get(hf, "full_attention_interval", 4)
    layers = range(config_require(hf, "num_hidden_layers"))
    return [FULL if (layer + 1) % every == 0 else LINEAR for layer in layers]


def layers_of_kind(hf: HfConfig, kind: str, types: Sequence[str]) -> tuple[int, ...]:
    """The layers of this kind in `layer_types`, of which `types` are the family's default."""
    count = config_require(hf, "num_hidden_layers")
    types = layer_types(hf, types)
    if len(types) < count:
        raise ConfigError(
            f"the model's layer_types (config.json) has {len(types)} entries, and "
            f"num_hidden_layers is {count}. Correct the config.json that model.config_path names."
        )
    return tuple(index for index, type_ in enumerate(types[:count]) if type_ == kind)


def unsupported_activation(hf: HfConfig, field: str = "hidden_act") -> tuple[str, ...]:
    """`hidden_act` is that of the convolutions too, which have SiLU."""
    activation = config_get(hf, field, "silu")
    if activation in SILU:
        return ()
    return (f"{field} is {activation!r}; {', '.join(SILU)} are computed after convolutions",)
