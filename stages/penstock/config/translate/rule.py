"""Rules of foreign keys: what becomes of a value."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.config.loading.fault import shown
from penstock.config.translate.translation import Entry, Rule

# Values of a key that asks for nothing.
OFF: tuple[Any, ...] = (False, 0, "", [], {})


def no_effect(why: str) -> Rule:
    """Rule of a key that has no effect here."""
    return lambda entry: entry.no_effect(why)


def unsupported(why: str) -> Rule:
    """Rule of a key that is left out unless it is false, 0 or empty."""
    return when(lambda entry: entry.value not in OFF, left_out(why), "is off")


def refused(why: str) -> Rule:
    """Rule of a key that is refused unless it is false, 0 or empty."""
    return when(lambda entry: entry.value not in OFF, refuses(why), "is off")


def refuses(why: str) -> Rule:
    """Rule of a value that is refused."""
    return lambda entry: entry.refuse(why)


def put(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Rule of a value that a setting takes, as it is or converted."""
    return lambda entry: entry.put(name, convert(entry.value))


def approximated(why: str) -> Rule:
    """Rule of a key for which something similar is done here."""
    return lambda entry: entry.approximated(why)


def if_on(rule: Rule, otherwise: str | Rule) -> Rule:
    """Rule of a key that has no effect, or another one, if it is false, 0 or empty."""
    return when(lambda entry: entry.value, rule, otherwise)


def when(holds: Callable[[Entry], Any] | str, rule: Rule, otherwise: str | Rule) -> Rule:
    """Rule of a key that is read only where something holds, or another key is on; `otherwise` is
    why it has no effect, or another rule."""
    other_rule = no_effect(otherwise) if isinstance(otherwise, str) else otherwise

    def apply(entry: Entry) -> None:
        is_read = entry.get(holds) if isinstance(holds, str) else holds(entry)
        (rule if is_read else other_rule)(entry)

    return apply


def sets(settings: Mapping[str, Any], why: str = "") -> Rule:
    """Rule of a key that stands for these settings, whatever its value; `why` explains them."""

    def apply(entry: Entry) -> None:
        for name, value in settings.items():
            entry.put(name, value)
        if why:
            entry.explain(why)

    return apply


def in_turn(*rules: Rule) -> Rule:
    """Several rules of one key."""

    def apply(entry: Entry) -> None:
        for rule in rules:
            rule(entry)

    return apply


def explained(rule: Rule, why: str) -> Rule:
    """A rule whose result is the same as there, for a reason that the report gives."""
    return in_turn(rule, lambda entry: entry.explain(why))


def left_out(why: str) -> Rule:
    """Rule of a value that is left out."""
    return lambda entry: entry.leave_out(why)


def decides(*names: str) -> Rule:
    """Rule of a key that affects settings which another rule, or `finalize`, sets."""
    return lambda entry: entry.decides(*names)


def where(key: str, *values: Any, then: str | Rule) -> Rule:
    """Rule of a setting, or another rule, that is used if another key has one of `values`."""
    rule = put(then) if isinstance(then, str) else then
    allowed = " or ".join(shown(value) for value in values)
    return when(lambda entry: entry.get(key) in values, rule, f"read with {key}: {allowed} alone")


def is_on(value: Any) -> bool:
    """Whether a switch is on. Raises TypeError for lists and mappings."""
    if isinstance(value, list | dict):
        raise TypeError("a switch is no list and no mapping")
    return bool(value)


def negated(name: str) -> Rule:
    """Rule of a boolean whose setting here is its opposite."""
    return put(name, lambda value: not is_on(value))


def if_true(name: str, value: Any, otherwise: str) -> Rule:
    """Rule of a boolean that sets a value if true; `otherwise` is why false has no effect."""
    return when(lambda entry: is_on(entry.value), sets({name: value}), otherwise)


def unless_minus_one(name: str, otherwise: str) -> Rule:
    """Rule of a number for which -1 means unset."""
    return when(lambda entry: entry.value != -1, put(name), otherwise)


def truth(name: str) -> Rule:
    """Rule of a boolean that may be written as any value."""
    return put(name, is_on)


def only(*allowed: Any) -> Rule:
    """Rule of a key for which there are no other values here than `allowed`."""
    return when(
        lambda entry: not isinstance(entry.value, list | dict) and entry.value in allowed,
        no_effect("this is always the behavior here"),
        left_out(f"here it is always {', '.join(map(str, allowed))}"),
    )


def choice(
    name: str, choices: Mapping[Any, Any], otherwise: Callable[[str], Rule] = left_out
) -> Rule:
    """Rule of a key with some values, each with one of ours; `otherwise` makes that of others."""
    why = f"it takes {', '.join(map(str, choices))}"
    return when(
        lambda entry: not isinstance(entry.value, list | dict) and entry.value in choices,
        put(name, choices.get),
        otherwise(why),
    )
