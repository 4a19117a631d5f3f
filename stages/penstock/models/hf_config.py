"""Reads Hugging Face's config.json: what the families share, and what is unsupported in all of
them.

No torch: whether a parallel layout fits a model is checked before anything slow is imported.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.decoder_config import LENGTH_DEPENDENT_ROPE, Activation, DecoderConfig
from penstock.models.quantization_config import parse_quantization_config

HfConfig = Mapping[str, Any]

# Model types whose published code is that of another type; transformers has no class for them.
SAME_CODE: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}


class NotNativeError(CapabilityError):
    """The native family of a model type does not compute this config.json; transformers does."""

    def __init__(self, message: str, reasons: Iterable[str]) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


# Supported RoPE types.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", *LENGTH_DEPENDENT_ROPE)

# Parameters of each RoPE type besides `rope_theta` and `partial_rotary_factor`, as in transformers'
# `modeling_rope_utils`.
ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
    ),
    "longrope": (
        "factor",
        "short_factor",
        "long_factor",
        "attention_factor",
        "original_max_position_embeddings",
    ),
}

ROPE_KEYS = frozenset(
    ("rope_type", "rope_theta", "partial_rotary_factor", *sum(ROPE_NUMBERS.values(), ()))
)

# Those of them that are not numbers but booleans or lists.
NON_NUMERIC_ROPE_KEYS = ("truncate", "short_factor", "long_factor")

# Parameters that `attention_factor` replaces. YaRN's `mscale` has an effect only with
# `mscale_all_dim`.
REPLACED_BY_ATTENTION_FACTOR = {"yarn": ("mscale", "mscale_all_dim"), "longrope": ("factor",)}

SILU = ("silu", "swish")
# `hidden_act` values; experts only support SiLU.
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(SILU, "silu"),
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# `hidden_act` values of MLPs without a gate.
UNGATED: Mapping[str, Activation] = {**ACTIVATIONS, "relu": "relu", "relu2": "relu2"}

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"
"""`layer_types` values of full, sliding-window, chunked and linear attention."""
OLD_LAYER_TYPES: Mapping[str, str] = {"attention": FULL, "mamba": LINEAR}
"""What files of transformers before version 5 say for them."""


def decoder_config(
    hf: HfConfig,
    *,
    defaults: Mapping[str, Any] | None = None,
    unsupported: Iterable[str] = (),
    not_native: Iterable[str] = (),
    hidden_act: str = "silu",
    named: Mapping[str, str] | None = None,
    layer_type: str = FULL,
    **specific: Any,
) -> DecoderConfig:
    """The DecoderConfig of a config.json. `defaults` are the family's, of fields that have the same
    name in both. `specific` are its own values, which take precedence over the file. `unsupported`
    are unsupported settings that the family found, `not_native` those that transformers computes
    as they are, `hidden_act` is the family's default activation, `named` maps field names to the
    names in the family's files, and `layer_type` is what `layer_types` calls layers of no other
    kind.

    Raises:
        ConfigError: a required field is missing.
        NotNativeError: the config has settings of `not_native`, or another activation.
        CapabilityError: the config has unsupported settings.
    """
    # Read first, so that foundation.py knows their types whatever is raised below.
    own = {name: config_get(hf, name, value) for name, value in (defaults or {}).items()}
    gated = specific.get("gated", True)
    activations = ACTIVATIONS if gated else UNGATED
    inner, act = ((named or {}).get(name, name) for name in ("intermediate_size", "hidden_act"))
    activation = config_get(hf, act, hidden_act)
    supported = SILU if gated and specific.get("experts") else tuple(activations)
    if activation not in supported:
        not_native = (
            *not_native,
            f"{act} is {activation!r}; {', '.join(supported)} are computed",
        )
    states = specific.get("linear")
    kinds = tuple(
        kind
        for kind, field in (
            (SLIDING, "sliding_layers"),
            (CHUNKED, "chunked_layers"),
            (states.layer_type if states else LINEAR, "linear_layers"),
        )
        if field in specific
    )
    check_supported(hf, unsupported, not_native, kinds=(layer_type, *kinds))
    heads = config_require(hf, "num_attention_heads")
    hidden = config_require(hf, "hidden_size")
    fields = {
        "vocab_size": config_require(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": config_get(hf, "num_key_value_heads", heads),
        "head_dim": config_get(hf, "head_dim", hidden // heads),
        "rms_norm_eps": config_get(hf, "rms_norm_eps", 1e-6),
        "max_position_embeddings": config_require(hf, "max_position_embeddings"),
        "tie_word_embeddings": config_get(hf, "tie_word_embeddings", False),
        "initializer_range": config_get(hf, "initializer_range", 0.02),
        "activation": activations[activation],
        **own,
    }
    fields["tie_word_embeddings"] = bool(fields["tie_word_embeddings"])
    # Fields that a family computes may be absent in its files.
    if "num_hidden_layers" not in specific:
        fields["num_hidden_layers"] = config_require(hf, "num_hidden_layers")
    if "intermediate_size" not in specific:
        fields["intermediate_size"] = config_require(hf, inner)
    if "rope_parameters" not in specific:
        fields["rope_parameters"] = full_rope(hf)
    return DecoderConfig(**{**fields, **specific})


def attention_bias(hf: HfConfig, *, default: bool = False) -> dict[str, Any]:
    """The bias fields of attention, both as `attention_bias` says."""
    bias = bool(config_get(hf, "attention_bias", default))
    return {"qkv_bias": bias, "o_bias": bias}


def mlp_bias(hf: HfConfig, *, default: bool = False) -> dict[str, Any]:
    """The bias field of MLPs."""
    return {"mlp_bias": bool(config_get(hf, "mlp_bias", default))}


def layer_types(hf: HfConfig, default: Sequence[str]) -> list[str]:
    """`layer_types` by the names of transformers 5."""
    return [OLD_LAYER_TYPES.get(kind, kind) for kind in config_get(hf, "layer_types", default)]


def native_type(hf: HfConfig) -> str | None:
    """The model type, or the one whose code a model of this type has."""
    model_type = hf.get("model_type")
    return SAME_CODE.get(str(model_type), model_type)


# Required fields that others are divided by or that size a tensor.
POSITIVE = ("num_attention_heads", "hidden_size", "vocab_size")


def config_require(hf: HfConfig, name: str) -> Any:
    """A required field."""
    if hf.get(name) is None:
        raise ConfigError(
            f"the model's config.json has no {name}. "
            "Point model.config_path at a complete config.json of a Hugging Face model."
        )
    if hf[name] == 0 and name in POSITIVE:
        raise ConfigError(
            f"the model's config.json has {name}: 0.\n"
            "  Restore its config.json from where the model comes from."
        )
    return hf[name]


def config_get(hf: HfConfig, name: str, default: Any) -> Any:
    """An optional field; the default also replaces null."""
    value = hf.get(name, default)
    return default if value is None else value


def aux_loss_coef(hf: HfConfig, default: float = 0.001) -> float:
    """The coefficient of the load-balancing loss. As in transformers it is 0 unless
    `output_router_logits` is true. `default` is the family's."""
    return config_get(hf, "router_aux_loss_coef", default) * bool(
        config_get(hf, "output_router_logits", False)
    )


def rope_parameters(
    hf: HfConfig, *, theta: float = 10_000.0, share: float = 1.0
) -> Mapping[str, Any]:
    """RoPE parameters in the form of transformers 5, from either form.

    Transformers 5 has one `rope_parameters`; before, there was `rope_theta` beside `rope_scaling`,
    whose `rope_type` was first called `type`. `theta` and `share` (partial_rotary_factor) are the
    family's defaults. A share of 1 is left out.
    """
    # In transformers' order of precedence for a file that has both.
    parameters = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    parameters.setdefault("rope_theta", config_get(hf, "rope_theta", theta))
    return _complete_rope(hf, parameters, share)


def rope_by_layer(
    hf: HfConfig, *, theta: float, sliding_theta: float, sliding_field: str | None = None
) -> dict[str, Any]:
    """The RoPE fields of a DecoderConfig whose sliding layers have their own.

    Transformers 5 has a table for each kind of layer; before, `rope_theta` and `rope_scaling` were
    those of full attention, and the field `sliding_field` the theta of sliding layers. `theta` and
    `sliding_theta` are the family's defaults.
    """
    tables = config_get(hf, "rope_parameters", {})
    if flat := sorted(set(tables) - {FULL, SLIDING}):
        raise CapabilityError(
            f"the model's rope_parameters (config.json) have {', '.join(flat)} beside the tables "
            f"{FULL} and {SLIDING}; this family has one table for each kind of layer."
        )
    full, sliding = (dict(config_get(tables, kind, {})) for kind in (FULL, SLIDING))
    full |= config_get(hf, "rope_scaling", {})
    full.setdefault("rope_theta", config_get(hf, "rope_theta", theta))
    local = config_get(hf, sliding_field, sliding_theta) if sliding_field else sliding_theta
    sliding.setdefault("rope_theta", local)
    full_rope, of_sliding = (
        require_full_rotary(_complete_rope(hf, table)) for table in (full, sliding)
    )
    return {"rope_parameters": full_rope, "sliding_rope_parameters": of_sliding}


def _complete_rope(
    hf: HfConfig, parameters: dict[str, Any], share: float = 1.0
) -> Mapping[str, Any]:
    kind = parameters.pop("type", "default")
    kind = parameters.setdefault("rope_type", kind)
    if kind not in ROPE_TYPES:
        reason = (
            f"the model's rotary embedding is of the kind {kind!r} (rope_parameters in "
            f"config.json); {', '.join(ROPE_TYPES)} are computed"
        )
        message = f"{reason}. Use a model with one of these, or write model.backend: transformers."
        raise NotNativeError(message, [reason])
    # Families with a table for each kind of layer use rope_by_layer.
    if nested := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
        raise CapabilityError(
            f"the model's rotary embedding differs by kind of layer ({', '.join(nested)} in "
            "rope_parameters); one for all layers is computed. Use a model with one."
        )
    own = parameters.pop("partial_rotary_factor", None)
    share = config_get(hf, "partial_rotary_factor", share) if own is None else own
    if share != 1.0:
        parameters["partial_rotary_factor"] = share
    if kind in ("llama3", "yarn", "longrope"):
        original_length = config_get(
            hf, "original_max_position_embeddings", config_require(hf, "max_position_embeddings")
        )
        parameters.setdefault("original_max_position_embeddings", original_length)
    return _select_rope_keys(parameters)


def _select_rope_keys(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = parameters["rope_type"]
    read = {"rope_type", "rope_theta", "partial_rotary_factor", *ROPE_NUMBERS[kind]}
    if parameters.get("attention_factor") is not None:
        read -= {*REPLACED_BY_ATTENTION_FACTOR.get(kind, ())}
    for name in read - {"rope_type", *NON_NUMERIC_ROPE_KEYS}:
        value = parameters.get(name)
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ConfigError(
                f"the model's {name} (rotary embedding, in config.json) is {value!r}, which is not "
                "a number. Correct the config.json that model.config_path names."
            )
    return {name: value for name, value in parameters.items() if name in read}


def require_full_rotary(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The RoPE parameters of a family without partial RoPE.

    Raises CapabilityError for a partial_rotary_factor: transformers does not support it in such a
    family either.
    """
    share = parameters.get("partial_rotary_factor")
    if share and parameters["rope_type"] != "proportional":
        raise CapabilityError(
            f"the model has partial RoPE (partial_rotary_factor {share} in "
            "config.json), which this family does not support. Use a model without it."
        )
    return parameters


def full_rope(hf: HfConfig, *, theta: float = 10_000.0) -> Mapping[str, Any]:
    """`rope_parameters` of a family without partial RoPE."""
    return require_full_rotary(rope_parameters(hf, theta=theta))


def sliding(hf: HfConfig, window: int | None, layers: Iterable[int]) -> dict[str, Any]:
    """The sliding-window fields of a DecoderConfig. The layers with the window are those in
    `layer_types`, or `layers` if there is none. `window` None: full attention."""
    types = config_get(hf, "layer_types", None)
    if types is not None:
        layers = (index for index, kind in enumerate(types) if kind == SLIDING)
    elif window is None:
        layers = ()
    chosen = tuple(layers)
    return {"sliding_window": window if chosen else None, "sliding_layers": chosen}


def sliding_but_every(hf: HfConfig, step: int) -> dict[str, Any]:
    """`sliding` for all layers but each `step`-th, with a window of 4096 tokens by default."""
    layers = range(config_require(hf, "num_hidden_layers"))
    return sliding(
        hf, hf.get("sliding_window", 4096), (layer for layer in layers if (layer + 1) % step)
    )


def sliding_everywhere(hf: HfConfig, window: int | None) -> dict[str, Any]:
    """The same for a family with the window in all layers, whatever `layer_types` says."""
    layers = tuple(range(config_require(hf, "num_hidden_layers"))) if window is not None else ()
    return {"sliding_window": window, "sliding_layers": layers}


def window_if_used(hf: HfConfig) -> int | None:
    """The window of the Qwen families, which only applies if `use_sliding_window` is true."""
    return hf.get("sliding_window", 4096) if config_get(hf, "use_sliding_window", False) else None


def sliding_after_max_window_layers(hf: HfConfig) -> dict[str, Any]:
    """`sliding` for the dense Qwen families: from layer `max_window_layers` on."""
    first = config_get(hf, "max_window_layers", 28)
    return sliding(hf, window_if_used(hf), range(first, config_require(hf, "num_hidden_layers")))


def check_supported(
    hf: HfConfig,
    unsupported: Iterable[str],
    not_native: Iterable[str] = (),
    *,
    kinds: tuple[str, ...],
) -> None:
    """Raise one error for everything that is unsupported in all families, and for `unsupported` and
    `not_native`: NotNativeError if transformers computes some of it, otherwise CapabilityError.

    `kinds` are the `layer_types` of this family.
    """
    unsupported, not_native = list(unsupported), list(not_native)
    if SLIDING not in kinds and config_get(hf, "use_sliding_window", False):
        not_native.append("use_sliding_window is true; attention over whole documents is computed")
    elif other_types := sorted(set(layer_types(hf, ())) - set(kinds)):
        not_native.append(
            f"layer_types names {', '.join(other_types)}; for this family {' and '.join(kinds)} "
            f"{'are' if len(kinds) > 1 else 'is'} computed"
        )
    # Models drop by train.dropout alone, whose masks do not depend on the parallel layout.
    if dropout := config_get(hf, "attention_dropout", 0.0):
        unsupported.append(
            f"attention_dropout is {dropout}; write 0 here (model.foundation overrides it), and"
            f" train.dropout.attention: {dropout} if weights are to be dropped"
        )
    # For its refusals alone: the result is read where weights are.
    try:
        parse_quantization_config(hf)
    except CapabilityError as error:
        unsupported.append(str(error))
    if not (unsupported or not_native):
        return
    lines = "\n  ".join([*not_native, *unsupported])
    message = (
        f"the model's config.json has unsupported settings:\n  {lines}\n"
        "Change these fields in a copy that model.config_path names, or write model.backend: "
        "transformers."
    )
    raise NotNativeError(message, not_native) if not_native else CapabilityError(message)
