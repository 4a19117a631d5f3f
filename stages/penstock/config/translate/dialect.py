"""A dialect: the config format of another tool, in tables.

Every key is in one of four tables: `same`, values that are copied to a setting of ours;
`computed`, values that a rule converts; `unsupported`, values that are left out; and `idle`, values
that change nothing here. Items of lists have tables of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Literal, Self, cast

from penstock.config.loading.fault import shown
from penstock.config.translate.translation import Draft, Rule

Values = Mapping[str, Any]

# Texts that NeMo's files have for null.
NOTHING = ("None", "none", "")

ValueType = Literal["switch", "number", "text"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The keys of a mapping. Names of nested keys are joined with dots (`trainer.devices`); a key
    may also name a whole mapping."""

    # Foreign key to our dotted name.
    same: Mapping[str, str] = field(default_factory=dict[str, str])
    # Foreign key to its rule.
    computed: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    # Foreign key to the reason why it is left out unless its value is in `OFF`.
    unsupported: Mapping[str, str] = field(default_factory=dict[str, str])
    # Foreign key to the reason why it has no effect here, whatever its value.
    idle: Mapping[str, str] = field(default_factory=dict[str, str])
    # Foreign key to the type of its value, for rules that would take any.
    types: Mapping[str, "ValueType"] = field(default_factory=dict[str, "ValueType"])
    # Prefixes of keys that are in no table to their rule, or the reason why they have no effect
    # here.
    families: Mapping[str, Rule | str] = field(default_factory=dict[str, Rule | str])

    @cached_property
    def keys(self) -> set[str]:
        return {*self.same, *self.computed, *self.unsupported, *self.idle}

    def over(self, base: "Table", *unknown: str) -> Self:
        """This table, and that of a tool which it is built on for keys that are not in it.
        `unknown` are keys of the latter that are not passed on."""

        def inherited(entries: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
            hidden = {*self.keys, *unknown}
            return {**{key: entries[key] for key in entries if key not in hidden}, **own}

        names = ("same", "computed", "unsupported", "idle")
        return replace(self, **{n: inherited(getattr(base, n), getattr(self, n)) for n in names})


@dataclass(frozen=True)
class Dialect(Table):
    """One foreign format."""

    # As in `--dialect`.
    name: str
    # The name of the tool.
    title: str
    # Whether a file, as parsed, is in this format.
    recognizes: Callable[[Values], bool]
    # Values of keys that are left out, translated like written ones and reported as assumed. Only
    # those that may change results compared with our own defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Defaults that depend on the keys in a file; they replace those in `defaults`.
    inferred: Callable[[Values], Values] = lambda _: {}
    # A key to the keys that replace it where they are written.
    overridden_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    # Keys whose null has a meaning. For other keys null is the same as leaving the key out.
    meaningful_nulls: frozenset[str] = frozenset()
    # Settings that every run needs and such a file never has, which the user must write, with
    # values that are used to validate the rest.
    placeholders: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Applied to the values first, for example to resolve references.
    prepare: Callable[[Values], Values] = lambda values: values
    # Translates what several keys decide together, after all rules.
    finalize: Callable[[Draft], None] = lambda _: None


def why_not_of(kind: ValueType | None, value: Any) -> str | None:
    """Why a value is not of this type; None if it is."""
    is_valid, meant = True, ""
    if kind == "switch":
        is_valid, meant = isinstance(value, int) and value in (0, 1), "true or false"
    elif kind == "text":
        is_valid, meant = isinstance(value, str), "text"
    elif kind == "number":
        meant = "a number"
        try:
            is_valid = value in NOTHING or (not isinstance(value, bool) and float(value) > -inf)
        except (TypeError, ValueError):
            is_valid = False
    return None if is_valid else f"{shown(value)} where {meant} is meant"


def typed(**names: str) -> dict[str, "ValueType"]:
    """The types of keys: `typed(switch="bf16 packing")`."""
    return {name: cast("ValueType", kind) for kind, keys in names.items() for name in keys.split()}


def by_reason(text: str) -> dict[str, str]:
    """Foreign keys to their reasons, of a text such as `key key: reason`, where keys that share a
    reason may stand in several lines."""
    reasons: dict[str, str] = {}
    keys: list[str] = []
    for line in text.splitlines():
        names, colon, why = line.partition(": ")
        keys += names.split()
        if colon:
            reasons |= dict.fromkeys(keys, why)
            keys = []
    return reasons


def same_names(section: str, keys: str) -> dict[str, str]:
    """Foreign keys that have the same names here, in a section."""
    return {key: f"{section}{key}" for key in keys.split()}


def is_flat(values: Values) -> bool:
    """Whether a file has none of our sections, as in all flat dialects."""
    return not any(isinstance(values.get(name), dict) for name in ("model", "data", "train"))


def listed(value: Any) -> list[Any]:
    """A list unchanged; any other value as a list of one."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]
