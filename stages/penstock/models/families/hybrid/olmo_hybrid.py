"""OLMo Hybrid: three layers of Gated DeltaNet with norms of their inputs, then one of attention
with norms of its outputs, as in OLMo 2."""

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.families.dense.olmo2 import olmo_config
from penstock.models.families.hybrid.fields import ROLES, layers_of_kind, unsupported_activation
from penstock.models.family import LINEAR_PARTS, Family
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    HfConfig,
    config_get,
    config_require,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.linear_config import GatedDeltaConfig
from penstock.models.state_layer_config import InitialValues, config_error
from penstock.models.tp_roles import SPLIT_QK_NORM_ROLES

NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    earlier=(
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ),
)
"""The same name is of the input norm of an MLP in one kind of layers, and of the output norm of
attention in the other."""
NORM_EPS = 1e-5
"""Of gated norms, whatever rms_norm_eps is."""


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OLMo Hybrid's config.json."""
    layers = range(config_require(hf, "num_hidden_layers"))
    is_rotary = _theta(hf) is not None
    rope = {**hf, "rope_scaling": None, "rope_parameters": None}
    return olmo_config(
        hf,
        not_native=unsupported_activation(hf),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-6),
        rope_parameters=require_full_rotary(rope_parameters(hf if is_rotary else rope)),
        no_rope_layers=() if is_rotary else tuple(layers),
        linear=_gated_delta(hf),
        linear_layers=layers_of_kind(hf, LINEAR, _default_types(len(layers))),
        linear_input_norms=True,
        names=NAMES,
    )


def _theta(hf: HfConfig) -> float | None:
    """The theta of RoPE; None, which a file must say, for none in any layer."""
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    return parameters.get("rope_theta", hf.get("rope_theta", 10_000.0))


def _default_types(count: int) -> list[str]:
    types = [FULL if index % 4 == 3 else LINEAR for index in range(count)]
    return types if FULL in types else [*types[:-1], FULL]


def _gated_delta(hf: HfConfig) -> GatedDeltaConfig:
    heads = config_require(hf, "num_attention_heads")
    key_heads = config_get(hf, "linear_num_key_heads", heads)
    key_dim = config_get(
        hf, "linear_key_head_dim", int(0.75 * config_require(hf, "hidden_size") / key_heads)
    )
    rates = _range(hf, "linear_a_log", 0.0, 16.0)
    steps = _range(hf, "linear_dt", 1e-3, 0.1)
    floor = config_get(hf, "linear_dt_init_floor", 1e-4)
    return GatedDeltaConfig(
        key_heads=key_heads,
        value_heads=config_get(hf, "linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=config_get(hf, "linear_value_head_dim", 2 * key_dim),
        kernel=config_get(hf, "linear_conv_kernel_dim", 4),
        separate=True,
        doubles_rates=bool(hf.get("linear_allow_neg_eigval", True)),
        norm_eps=NORM_EPS,
        initial={
            "A_log": InitialValues("log_uniform", *rates),
            "dt_bias": InitialValues("softplus_log_uniform", *steps, floor),
        },
    )


def _range(hf: HfConfig, name: str, low: float, high: float) -> tuple[float, float]:
    """The bounds of a random number, which are `low` and `high` by default."""
    low, high = config_get(hf, f"{name}_min", low), config_get(hf, f"{name}_max", high)
    if not 0 <= low < high:
        raise config_error(f"{name}_min is {low}; it must be less than {name}_max ({high})")
    return low, high


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    read,
    {**SPLIT_QK_NORM_ROLES, **ROLES},
    lora_targets=(*LINEAR_PARTS, "g_proj"),
)
