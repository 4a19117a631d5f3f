"""Gemma 4, text: Gemma 3 with plain RMSNorm, normed values and a factor of each layer's output;
layers with full attention have heads of another size, and keys that are values too.

Models with inputs of each layer, experts, or keys and values that layers share are not native.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.models.decoder_config import DecoderConfig, HeadSizes
from penstock.models.families.gemma.gemma import ROLES, gemma_config
from penstock.models.families.gemma.gemma2 import NAMES
from penstock.models.family import Family
from penstock.models.hf_config import (
    FULL,
    SLIDING,
    HfConfig,
    config_get,
    config_require,
    rope_by_layer,
)

ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""RoPE of a config.json without `rope_parameters`."""


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Gemma 4's text config."""
    layers = sliding_layers(hf)
    rope = hf if hf.get("rope_parameters") else {**hf, "rope_parameters": ROPE}
    return gemma_config(
        hf,
        not_native=_reasons(hf, layers),
        hidden_act="hidden_activation",
        norm="rms",
        output_norms=True,
        qk_norm=True,
        value_norm=True,
        layer_scalars=True,
        attention_scale=1.0,
        logit_soft_cap=config_get(hf, "final_logit_softcapping", None),
        full_attention_heads=full_attention_heads(hf),
        sliding_window=config_get(hf, "sliding_window", 512) if layers else None,
        sliding_layers=layers,
        names=NAMES,
        **rope_by_layer(rope, theta=1e6, sliding_theta=1e4),
    )


def sliding_layers(hf: HfConfig) -> tuple[int, ...]:
    """Indices of the layers with a window: five of six by default, and never the last."""
    last = config_require(hf, "num_hidden_layers") - 1
    pattern = [SLIDING if (index + 1) % 6 else FULL for index in range(last)]
    kinds: Sequence[str] = config_get(hf, "layer_types", pattern)[:last]
    return tuple(index for index, kind in enumerate(kinds) if kind == SLIDING)


def full_attention_heads(hf: HfConfig) -> HeadSizes:
    """The head sizes of layers without a window. Published files name them, those that transformers
    writes have them by layer (`per_layer_config`)."""
    shared = bool(config_get(hf, "attention_k_eq_v", False))
    keys = config_get(hf, "num_key_value_heads", 4)
    own: dict[str, Any] = {"head_dim": config_get(hf, "global_head_dim", 512)}
    if shared:
        own["num_key_value_heads"] = config_get(hf, "num_global_key_value_heads", keys)
    if by_layer := hf.get("per_layer_config"):
        own = next(iter(by_layer.values()))
    return HeadSizes(
        own.get("head_dim", config_get(hf, "head_dim", 256)),
        own.get("num_key_value_heads", keys),
        keys_are_values=shared,
    )


def _reasons(hf: HfConfig, layers: Sequence[int]) -> Iterator[str]:
    """Settings that only transformers computes."""
    if size := config_get(hf, "hidden_size_per_layer_input", 256):
        yield f"hidden_size_per_layer_input is {size}; layers have no inputs of their own here"
    if count := config_get(hf, "num_kv_shared_layers", 0):
        yield f"num_kv_shared_layers is {count}; every layer has its own keys and values here"
    if config_get(hf, "enable_moe_block", False):
        yield "enable_moe_block is true; layers have no experts here"
    by_layer = config_get(hf, "per_layer_config", {})
    full = {
        index for index in range(config_require(hf, "num_hidden_layers")) if index not in layers
    }
    if by_layer and (
        {int(layer) for layer in by_layer} != full
        or len({tuple(sorted(own.items())) for own in by_layer.values()}) > 1
        or {name for own in by_layer.values() for name in own} - {"head_dim", "num_key_value_heads"}
    ):
        yield (
            "per_layer_config differs otherwise than by head_dim and num_key_value_heads of layers "
            "with full attention"
        )


GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", read, ROLES)
