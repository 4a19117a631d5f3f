"""Translate single keys with the tables of a dialect, and those of the items of a list."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from penstock.config.loading.fault import shown
from penstock.config.translate import rule
from penstock.config.translate.dialect import Table, why_not_of
from penstock.config.translate.translation import Entry, Line, Rule

# Ratio of difflib at which a known key is suggested.
MIN_SIMILARITY = 0.7

# The same for a key of a family, of which not all keys are known.
VERY_SIMILAR = 0.94


def flat_keys(
    values: Mapping[str, Any], keys: set[str], above: str = ""
) -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, by dotted names; `keys` may name whole mappings."""
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value and key not in keys:
            yield from flat_keys(cast("dict[str, Any]", value), keys, f"{key}.")
        else:
            yield key, value


def translate_items(
    entry: Entry, items: Sequence[Mapping[str, Any]], table: Table, into: str
) -> None:
    """Translate the mappings in a list, or the one mapping in its place, with a table, each into
    the item of our list `into` that has the same index; the keys of each have lines of their
    own."""
    is_list = isinstance(cast("object", entry.value), list)
    for index, item in enumerate(items):
        above = f"{entry.key}.{index}" if is_list else entry.key
        for key, value in flat_keys(item, table.keys):
            line = Line(f"{above}.{key}", value, "translated")
            entry.draft.lines[line.key] = line
            part = Entry(entry.draft, line, f"{into}.{index}", item)
            translate_key(part, table, key, entry.key, is_null=value is None)


def translate_key(entry: Entry, table: Table, key: str, title: str, *, is_null: bool) -> None:
    """Translate one key of a mapping that `title` names in messages."""
    line = entry.line
    family = next((name for name in table.families if key.startswith(name)), None)
    is_typo = key not in table.keys and get_close_matches(key, table.keys, 1, VERY_SIMILAR)
    if key not in table.keys and (family is None or is_typo):
        nested = key.rpartition(".")[2]
        is_known = nested in table.keys
        near = [nested] if is_known else get_close_matches(key, table.keys, 1, MIN_SIMILARITY)
        meant = f"; did you mean {near[0]}?" if near else ""
        line.kind, line.why = "unknown", f"is not a known key of {title}{meant}"
    elif is_null:
        line.kind, line.why = "no effect", "null, the same as leaving it out"
    elif key in table.unsupported:
        apply_rule(rule.unsupported(table.unsupported[key]), entry)
    elif key in table.same:
        line.kind = "maps"
        entry.put(table.same[key], line.value)
    elif why := why_not_of(table.types.get(key), line.value):
        entry.refuse(why)
    elif key in table.idle:
        entry.no_effect(table.idle[key])
    else:
        apply = table.computed.get(key) or table.families[family or ""]
        apply_rule(rule.no_effect(apply) if isinstance(apply, str) else apply, entry)
        assert entry.is_handled, f"{title}: {key} is read and nothing is said of it"
        if line.kind == "translated" and not line.why and len(line.names) == 1:
            setting = entry.draft.value(line.names[0])
            if type(setting) is type(line.value) and setting == line.value:
                line.kind = "maps"


def apply_rule(apply: Rule, entry: Entry) -> None:
    """Apply a rule. Rules assume that values have the right type; a value for which they fail is
    refused."""
    try:
        apply(entry)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError):
        entry.refuse(f"{shown(entry.value)} is not a valid value")
