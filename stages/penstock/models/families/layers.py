"""Reads the experts in config.json, and which layers have experts or a state."""

from collections.abc import Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.extensions import FAMILIES
from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.hf_config import (
    OLD_LAYER_TYPES,
    SILU,
    HfConfig,
    NotNativeError,
    config_get,
    config_require,
)

ROUTED = ("n_routed_experts", "num_local_experts")
SPARSE = "sparse"
"""A layer with experts, in mlp_layer_types."""
NO_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
"""RoPE parameters of a model in which no layer has RoPE."""


def per_layer(hf: HfConfig, field: str, default: Sequence[Any]) -> Sequence[Any]:
    """A field with a value for each layer. Raises ConfigError for fewer."""
    count = config_require(hf, "num_hidden_layers")
    values: Sequence[Any] = config_get(hf, field, default)
    if len(values) < count:
        raise ConfigError(
            f"the model's {field} (config.json) has {len(values)} entries, and "
            f"num_hidden_layers is {count}. Correct the config.json that model.config_path names."
        )
    return values[:count]


def layers_of_kind(hf: HfConfig, kind: str, types: Sequence[str]) -> tuple[int, ...]:
    """The layers of this kind in `layer_types`, of which `types` are the family's default."""
    kinds = per_layer(hf, "layer_types", types)
    return tuple(
        index for index, value in enumerate(kinds) if OLD_LAYER_TYPES.get(value, value) == kind
    )


def sparse_layers(hf: HfConfig, dense: int) -> tuple[int, ...]:
    """The layers with experts: those in `mlp_layer_types`, or all but the first `dense`."""
    count = config_require(hf, "num_hidden_layers")
    default = ["dense"] * dense + [SPARSE] * max(0, count - dense)
    kinds = per_layer(hf, "mlp_layer_types", default)
    return tuple(index for index, kind in enumerate(kinds) if kind == SPARSE)


def layers_from(hf: HfConfig, first: int) -> range:
    """All layers but the first; `first` is the family's default of first_k_dense_replace."""
    first = config_get(hf, "first_k_dense_replace", first)
    return range(first, config_require(hf, "num_hidden_layers"))


def read_experts(
    hf: HfConfig,
    layers: Sequence[int],
    counts: Sequence[str] = ("num_experts",),
    *,
    count: int,
    chosen: int,
    width: int | None = None,
    normalized: bool | None = None,
    **specific: Any,
) -> ExpertsConfig | None:
    """The experts of these layers, with these values; None without layers.

    `counts` are the names of the number of experts, the first takes precedence. `count`, `chosen`
    (num_experts_per_tok), `width` (moe_intermediate_size) and `normalized` (norm_topk_prob) are the
    family's defaults; None: intermediate_size, and no such field.
    """
    if not layers:
        return None
    fields = {
        "num_experts": read_count(hf, counts, count),
        "experts_per_token": config_get(hf, "num_experts_per_tok", chosen),
    }
    if width is None:
        fields["intermediate_size"] = config_require(hf, "intermediate_size")
    else:
        fields["intermediate_size"] = config_get(hf, "moe_intermediate_size", width)
    if normalized is not None:
        fields["norm_topk_prob"] = bool(config_get(hf, "norm_topk_prob", normalized))
    return ExpertsConfig(**{"layers": tuple(layers), **fields, **specific})


def read_count(hf: HfConfig, names: Sequence[str], count: int) -> int:
    """The number of experts by these names, of which the first takes precedence."""
    for name in reversed(names):
        count = config_get(hf, name, count)
    return count


def read_routed_experts(
    hf: HfConfig,
    layers: Sequence[int],
    counts: Sequence[str] = ROUTED,
    *,
    count: int,
    width: int,
    scale: float,
    groups: tuple[int, int] = (1, 1),
    shared: int = 1,
    shared_count: str = "n_shared_experts",
    normalized: bool = True,
    **specific: Any,
) -> ExpertsConfig | None:
    """`read_experts` with the routing of DeepSeek V3: sigmoid scores within groups, a selection
    bias and shared experts, whose number is the field `shared_count`."""
    if not layers:
        return None
    inner = config_get(hf, "moe_intermediate_size", width)
    fields = {
        "shared_intermediate_size": inner * config_get(hf, shared_count, shared),
        "scoring": "sigmoid",
        "num_groups": config_get(hf, "n_group", groups[0]),
        "groups_per_token": config_get(hf, "topk_group", groups[1]),
        "scale": config_get(hf, "routed_scaling_factor", scale),
        "selection_bias": (read_count(hf, counts, count),),
    }
    return read_experts(
        hf,
        layers,
        counts,
        count=count,
        width=width,
        normalized=normalized,
        **{**fields, **specific},
    )


def hybrid_config(hf: HfConfig) -> DecoderConfig | None:
    """The DecoderConfig of a model of a hybrid type; None where it has no layers with a state, or
    is computed by transformers."""
    try:
        config = FAMILIES.load(hf["model_type"]).read(hf)
    except NotNativeError:
        return None
    return config if config.linear_layers else None


def unsupported_activation(hf: HfConfig, field: str = "hidden_act") -> tuple[str, ...]:
    """`hidden_act` is that of the convolutions too, which have SiLU."""
    activation = config_get(hf, field, "silu")
    if activation in SILU:
        return ()
    return (f"{field} is {activation!r}; {', '.join(SILU)} are computed after convolutions",)
