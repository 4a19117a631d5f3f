"""Overrides of a model's config.json (`model.foundation`), and the check that each has an effect.

An override that nothing reads would be ignored silently, and training would use another model than
requested. So each override must matter: another value must give another model, or an invalid one.

No torch: overrides are checked before anything slow is imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import (
    FULL,
    ROPE_KEYS,
    SLIDING,
    HfConfig,
    NotNativeError,
    native_type,
)
from penstock.models.registry import find_family, get_family, native_family
from penstock.models.size_limits import validate_sizes

ROPE = "rope_parameters"
# Fields that were separate, beside `rope_scaling`, before transformers 5.
BEFORE_ROPE_PARAMETERS = ("rope_theta", "partial_rotary_factor")

# Names of the same field in different families; a config.json has one of them, and transformers
# accepts several.
ALIASES = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_k"),
)

SPECIAL_TOKENS = "the tokenizer and generation_config.json say which tokens are special"
NO_EFFECT: Mapping[str, str] = {
    "architectures": "it follows from model_type",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), SPECIAL_TOKENS),
    **dict.fromkeys(("dtype", "torch_dtype"), "write train.precision, or export.dtype"),
    "use_cache": "training has no cache, and sampling always one",
    "transformers_version": "it says what wrote the file",
}
"""Fields of config.json that do not affect the model, and why, or what to use instead."""

Path = tuple[str, ...]

PARSE_ERRORS = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)
"""Exceptions when a config.json with values of the wrong type is read."""

# Fields that are tables or null, with an example of each.
TABLE_EXAMPLES: Mapping[str, Any] = {"quantization_config": {"quant_method": "fp8"}}

# Lists with one value per layer; unlike others they may not be empty.
PER_LAYER = ("layer_types", "mlp_layer_types")

# What error messages call types; all other types are numbers.
TYPE_NAMES = {bool: "true or false", str: "text", list: "a list", dict: "a table"}


def apply_overrides(base: HfConfig, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json `base` with these overrides.

    Tables are merged. RoPE may be given in the form of transformers 5, `rope_parameters`, or in the
    older one, `rope_theta` and `partial_rotary_factor` beside `rope_scaling`. The result has the
    form of `base`, so that each number is in it once. The same applies to aliases of a field.
    `architectures` follows an overridden `model_type`.

    Raises:
        ConfigError: the two forms of RoPE contradict each other, there are more layers than
            layer types, or a size is larger than any model's.
    """
    merged: dict[str, Any] = deepcopy(dict(base))
    _merge(merged, {n: v for n, v in entries.items() if n not in _ROPE_ENTRIES}, base)
    if any(name in entries for name in _ROPE_ENTRIES):
        _set_rope(merged, entries)
    validate_sizes(merged, "model.foundation")
    counts = isinstance(merged.get("num_hidden_layers"), int)
    for name in PER_LAYER:
        if counts and merged.get(name) and name not in entries:
            merged[name] = _resize_layer_types(name, merged[name], merged["num_hidden_layers"])
    if merged.get("per_layer_config") and {"num_hidden_layers", "layer_types"} & set(entries):
        # transformers writes the head sizes of layers with full attention there, and makes the last
        # layer one of them.
        own = next(iter(merged["per_layer_config"].values()))
        *kinds, _ = merged["layer_types"]
        full = [str(index) for index, kind in enumerate(kinds) if kind == FULL]
        merged["per_layer_config"] = dict.fromkeys([*full, str(len(kinds))], own)
    model_type = merged.get("model_type")
    is_other = model_type != base.get("model_type") and "architectures" not in entries
    if is_other and (family := find_family(native_type(merged) or "")):
        merged["architectures"] = [family.architecture]
    return merged


def check_foundation(
    base: HfConfig, entries: Mapping[str, Any], *, loads_weights: bool = False
) -> None:
    """Raise one ConfigError for all overrides that have no effect.

    With `loads_weights` there is no random initialization. Also raises ConfigError for values of
    the wrong type, and CapabilityError for an unsupported model.
    """
    defaults = {**_collect_defaults(entries, base), **_collect_defaults({}, base)}
    if mismatches := list(_find_type_mismatches(entries, base, defaults)):
        raise ConfigError("\n".join(f"model.foundation.{fault}" for fault in mismatches))
    try:
        read = _RecordingConfig(apply_overrides(base, entries))
        family = get_family(read)
        family.read(read)
    except PARSE_ERRORS as error:
        raise _parse_error(base, entries, error) from error
    own = _try_parse(base, entries)
    faults: list[str] = []
    for path, value in _iter_leaves(entries):
        name = ".".join(path)
        if path[0] in NO_EFFECT:
            faults.append(f"{name}: {value!r} has no effect: {NO_EFFECT[path[0]]}")
        elif loads_weights and path == ("initializer_range",):
            faults.append(f"{name}: {value!r} has no effect: all weights are loaded")
        # Any other value must give another model, or an unsupported one.
        elif all(
            _try_parse(base, _set_path(entries, path, candidate)) == own
            for candidate in _other_values(value)
        ):
            faults.append(
                f"{name}: {value!r} has no effect: {_explain_no_effect(path, read.names, family)}"
            )
    if faults:
        lines = "\n  ".join(f"model.foundation.{fault}" for fault in faults)
        raise ConfigError(
            f"{lines}\nLeave out what has no effect; what differs from config.json must change the "
            "model."
        )


_ROPE_ENTRIES = (ROPE, "rope_scaling", *BEFORE_ROPE_PARAMETERS)


def _merge(merged: dict[str, Any], entries: Mapping[str, Any], base: HfConfig) -> None:
    for name, value in entries.items():
        field_name = _resolve_alias(name, base)
        below = merged.get(field_name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            inner = dict(below)
            _merge(inner, value, below)
            merged[field_name] = inner
        else:
            merged[field_name] = deepcopy(value)


def _resize_layer_types(name: str, types: Sequence[str], num_layers: int) -> list[str]:
    if len(types) < num_layers and len(set(types)) > 1:
        raise ConfigError(
            f"model.foundation.num_hidden_layers is {num_layers}, and config.json has {name} "
            f"for {len(types)} layers, of several kinds.\n"
            f"  Write model.foundation.{name} as well, {num_layers} of them."
        )
    more = [types[-1]] * (num_layers - len(types))
    return [*types, *more][:num_layers]


def _resolve_alias(name: str, base: HfConfig) -> str:
    if name in base:
        return name
    same = next((names for names in ALIASES if name in names), ())
    return next((alias for alias in same if alias in base), name)


def _set_rope(merged: dict[str, Any], entries: Mapping[str, Any]) -> None:
    overrides, tables = _normalize_rope_overrides(entries), merged.get(ROPE)
    if _has_tables(tables) or _has_tables(overrides):
        merged[ROPE] = _override_tables(tables if isinstance(tables, Mapping) else {}, overrides)
        return
    in_one = isinstance(merged.get(ROPE), Mapping) or (
        ROPE in entries and not any(name in merged for name in _ROPE_ENTRIES)
    )
    # In transformers' order of precedence for a file that has both.
    stored = dict(merged.get("rope_scaling") or merged.get(ROPE) or {})
    kind = stored.pop("type", "default")
    stored.setdefault("rope_type", kind)
    for name in BEFORE_ROPE_PARAMETERS:
        if merged.get(name) is not None:
            stored.setdefault(name, merged[name])
    table = _override_table(stored, overrides)
    for name in _ROPE_ENTRIES:
        merged.pop(name, None)
    if in_one:
        merged[ROPE] = table
        return
    for name in BEFORE_ROPE_PARAMETERS:
        if name in table:
            merged[name] = table.pop(name)
    merged["rope_scaling"] = None if table.get("rope_type", "default") == "default" else table


def _has_tables(parameters: Any) -> bool:
    return isinstance(parameters, Mapping) and any(
        isinstance(value, Mapping) for value in parameters.values()
    )


def _override_tables(stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(stored)
    for kind, table in overrides.items():
        below = stored.get(kind)
        if isinstance(below, Mapping) and isinstance(table, Mapping):
            table = _override_table(below, table)
        merged[kind] = table
    return merged


def _override_table(stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    kind = stored.get("rope_type", "default")
    if overrides.get("rope_type", kind) != kind:
        # Scaling parameters of the old rope_type do not apply to the new one.
        stored = {name: stored[name] for name in BEFORE_ROPE_PARAMETERS if name in stored}
    return {**stored, **overrides}


def _normalize_rope_overrides(entries: Mapping[str, Any]) -> dict[str, Any]:
    # The overrides of RoPE in either form, in that of transformers 5.
    overrides: dict[str, Any] = {}
    for table in (ROPE, "rope_scaling"):
        if table not in entries:
            continue
        if not isinstance(entries[table], Mapping | None):
            raise ConfigError(
                f"model.foundation.{table} is {entries[table]!r}, which is not a table.\n"
                "  Write one, such as {rope_type: linear, factor: 2.0}."
            )
        # Null means no scaling.
        table_values = dict(entries[table] or {"rope_type": "default"})
        if "type" in table_values:
            table_values.setdefault("rope_type", table_values.pop("type"))
        _merge_without_conflict(overrides, table_values, table)
    numbers = {name: entries[name] for name in BEFORE_ROPE_PARAMETERS if name in entries}
    _merge_without_conflict(overrides, numbers, "another entry")
    return overrides


def _merge_without_conflict(
    overrides: dict[str, Any], table_values: Mapping[str, Any], location: str
) -> None:
    for name, value in table_values.items():
        if name in overrides and overrides[name] != value:
            raise ConfigError(
                f"model.foundation says {name} twice: {overrides[name]!r} in {ROPE}, and {value!r} "
                f"in {location}.\n  Write it once, in {ROPE}."
            )
        overrides[name] = value


def _iter_leaves(entries: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in entries.items():
        if isinstance(value, Mapping) and value:
            yield from _iter_leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _find_type_mismatches(
    entries: Mapping[str, Any], stored: Any, defaults: Mapping[str, Any], above: str = ""
) -> Iterator[str]:
    """Empty tables, and values whose type differs from that in the file or, where it has none, of
    the default."""
    for name, value in entries.items():
        path = f"{above}{name}"
        own = stored.get(_resolve_alias(name, stored)) if isinstance(stored, Mapping) else None
        type_name = _type_name(defaults.get(name) if own is None else own)
        # An empty table merges nothing, and an empty list says nothing of any layer.
        if value == {} or (value == [] and name in PER_LAYER):
            yield f"{path}: {value!r} has no effect; leave it out"
        elif None not in (type_name, value) and _type_name(value) != type_name:
            has = "" if own is None else f", and config.json has {own!r}"
            yield f"{path}: {value!r} is {_type_name(value)}{has}; write {type_name}"
        elif isinstance(value, Mapping):
            yield from _find_type_mismatches(value, own, {}, f"{path}.")


def _collect_defaults(entries: Mapping[str, Any], base: HfConfig) -> dict[str, Any]:
    # The defaults of fields that config.json lacks, as far as it can be read.
    defaults = dict[str, Any](TABLE_EXAMPLES)
    with suppress(ConfigError, CapabilityError, *PARSE_ERRORS):
        read = _RecordingConfig(apply_overrides(base, entries))
        try:
            (native_family(read) or get_family(read)).read(read)
        finally:
            defaults |= read.defaults
    return defaults


def _type_name(value: Any) -> str | None:
    if value is None:
        return None
    return next((name for kind, name in TYPE_NAMES.items() if isinstance(value, kind)), "a number")


def _parse_error(base: HfConfig, entries: Mapping[str, Any], error: Exception) -> ConfigError:
    # The error for overrides with which config.json cannot be read; it names those whose removal
    # alone would fix it.
    leaves = list(_iter_leaves(entries))
    failing = [leaf for leaf in leaves if _try_parse(base, _remove_path(entries, leaf[0]))]
    named = ", ".join(
        f"model.foundation.{'.'.join(path)} ({value!r})" for path, value in failing or leaves
    )
    return ConfigError(
        f"{named} cannot be read as config.json has it: {error}.\n"
        "  Write a value as transformers documents it for this model_type."
    )


def _remove_path(entries: Mapping[str, Any], path: Path) -> dict[str, Any]:
    first, *tail = path
    other_entries = {name: value for name, value in entries.items() if name != first}
    inner = _remove_path(entries[first], tuple(tail)) if tail else {}
    return {**other_entries, first: inner} if inner else other_entries


def _try_parse(
    base: HfConfig, entries: Mapping[str, Any]
) -> DecoderConfig | Mapping[str, Any] | None:
    # The model with these overrides; the config.json of one that its native family does not
    # compute; None if it is invalid or unsupported.
    merged = base
    try:
        merged = apply_overrides(base, entries)
        family = native_family(merged) or get_family(merged)
        return _drop_unused_fields(family.read(merged))
    except NotNativeError:
        return merged
    except (ConfigError, CapabilityError, *PARSE_ERRORS):
        return None


def _drop_unused_fields(config: DecoderConfig) -> DecoderConfig:
    experts = config.experts
    if experts is not None and len(experts.layers) == config.num_hidden_layers:
        config = replace(config, intermediate_size=1)
    # RoPE of a kind of layer that the model has none of.
    if not config.sliding_layers:
        return replace(config, sliding_rope_parameters=None)
    if config.sliding_rope_parameters and len(config.sliding_layers) == config.num_hidden_layers:
        return replace(config, rope_parameters=config.sliding_rope_parameters)
    return config


def _other_values(value: Any) -> Iterator[Any]:
    # bool before int, of which it is a subclass.
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2, value // 2, 1, 0)
    elif isinstance(value, float):
        yield from (value + 1, value * 2, value / 2, 1.0)
    elif isinstance(value, str):
        yield from ("gelu", "silu", f"{value}?")
    elif isinstance(value, list | tuple):
        swapped = [_SWAPPED.get(item, item) if isinstance(item, str) else item for item in value]
        yield from (swapped, list(value)[::-1], value[:-1], [0])
    else:
        yield from (1, True, 0.5, "gelu", [1])


def _set_path(entries: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    changed = dict(entries)
    changed[path[0]] = value if len(path) == 1 else _set_path(entries[path[0]], path[1:], value)
    return changed


def _explain_no_effect(path: Path, read: set[str], family: Any) -> str:
    known_keys = ROPE_KEYS if len(path) > 1 and path[0] in _ROPE_ENTRIES else read
    name = ".".join(path).rpartition(".")[2]
    if name in known_keys:
        return "the other entries make it irrelevant"
    near = get_close_matches(name, sorted(known_keys), n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"models of the type {family.model_type} have no such field{meant}"


_SWAPPED = {FULL: SLIDING, SLIDING: FULL}


class _RecordingConfig(dict[str, Any]):
    """A config.json that records which fields are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.names: set[str] = set()
        self.defaults: dict[str, Any] = {}
        """The defaults of fields that were read but are missing."""

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        if default is not None:
            self.defaults[name] = default
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)
