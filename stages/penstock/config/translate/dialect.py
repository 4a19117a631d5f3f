"""What a dialect is: the configuration language of another tool, in tables.

Every key of it stands in one of three: SAME, whose values are taken over under our name; COMPUTED,
whose values a small function turns into ours; and REFUSED, which nothing here can honour.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.config.loading.fault import shown
from penstock.config.translate.translation import Draft, Entry

Rule = Callable[[Entry], None]
"""Turns one key into settings of ours (`entry.put`), or says why it becomes none."""

Values = Mapping[str, Any]


def _as_read(values: Values) -> Values:
    return values


def _nothing_more(draft: Draft) -> None:
    del draft


def _nothing_inferred(values: Values) -> Values:
    del values
    return {}


@dataclass(frozen=True)
class Dialect:
    """One foreign language. Names of nested keys are joined with dots (`trainer.devices`); a key of
    a table may also name a whole mapping, which its rule is then given."""

    name: str
    """As in `--dialect`."""

    title: str
    """As the tool calls itself."""

    recognizes: Callable[[Values], bool]
    """Whether a file, as read, is written in it."""

    same: Mapping[str, str] = field(default_factory=dict[str, str])
    """Their key to our dotted name."""

    computed: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    """Their key to what turns it into ours."""

    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Their key to why it is refused wherever it asks for something (is neither false, 0, nor
    empty)."""

    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a key that is left out means there: put through the same tables, and told as assumed.
    Those alone that may make other numbers than our own defaults."""

    inferred: Callable[[Values], Values] = _nothing_inferred
    """Defaults that depend on which keys a file writes; they replace those in `defaults`."""

    beaten: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """A key to those that stand in place of it where they are written."""

    nulls: frozenset[str] = frozenset()
    """Keys of which null says something. Elsewhere null is as if the key were left out."""

    lacks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of ours that every run needs and such a file never says, which people then write,
    with a value that stands for them while all the rest is judged."""

    prepare: Callable[[Values], Values] = _as_read
    """What is done to the values first, such as resolving references among them."""

    settle: Callable[[Draft], None] = _nothing_more
    """What several keys decide together, when each has been translated."""

    @property
    def keys(self) -> set[str]:
        """Every key that it knows."""
        return {*self.same, *self.computed, *self.refused}


def is_flat(values: Values) -> bool:
    """Whether a file has none of the sections of ours: what all flat dialects have in common."""
    return not any(isinstance(values.get(name), dict) for name in ("model", "data", "train"))


def listed(value: Any) -> list[Any]:
    """A list as it is, and of any other value a list of it alone."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def no_effect(why: str) -> Rule:
    """The rule of a key that changes nothing here, whatever it says."""

    def rule(entry: Entry) -> None:
        entry.no_effect(why)

    return rule


def decides(*names: str) -> Rule:
    """The rule of a key that has a part in settings which another one, or `settle`, puts."""
    return lambda entry: entry.decides(*names)


def where(key: str, *values: Any, name: str) -> Rule:
    """The rule of a setting that is read where another key has one of `values`."""

    def rule(entry: Entry) -> None:
        if entry.get(key) in values:
            entry.put(name, entry.value)
        else:
            allowed = " or ".join(shown(value) for value in values)
            entry.no_effect(f"read with {key}: {allowed} alone")

    return rule


def negated(name: str) -> Rule:
    """The rule of a truth that we ask the other way round."""

    def rule(entry: Entry) -> None:
        entry.put(name, not entry.value)

    return rule


def if_true(name: str, value: Any, otherwise: str) -> Rule:
    """The rule of a truth that puts a value of ours; false changes nothing, as `otherwise` says."""

    def rule(entry: Entry) -> None:
        if entry.value:
            entry.put(name, value)
        else:
            entry.no_effect(otherwise)

    return rule


def unless_minus_one(name: str, otherwise: str) -> Rule:
    """The rule of a number, of which -1 is none: another one counts then."""

    def rule(entry: Entry) -> None:
        if entry.value == -1:
            entry.no_effect(otherwise)
        else:
            entry.put(name, entry.value)

    return rule


def truth(name: str) -> Rule:
    """The rule of a truth that may be written as any value."""

    def rule(entry: Entry) -> None:
        entry.put(name, bool(entry.value))

    return rule


def only(*allowed: Any) -> Rule:
    """The rule of a key of which the engine computes what `allowed` asks for, and nothing else."""

    def rule(entry: Entry) -> None:
        if isinstance(entry.value, list | dict) or entry.value not in allowed:
            entry.refuse(f"it takes {', '.join(map(str, allowed))}")
        else:
            entry.no_effect("the only way there is here")

    return rule


def choice(name: str, choices: Mapping[Any, Any]) -> Rule:
    """The rule of a key that takes some values, each with one of ours; others are refused."""

    def rule(entry: Entry) -> None:
        value = entry.value
        if isinstance(value, list | dict) or value not in choices:
            entry.refuse(f"it takes {', '.join(map(str, choices))}")
        else:
            entry.put(name, choices[value])

    return rule
