"""Field-by-field diff of two cache-key identities."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

ABSENT = "(absent)"

LONGEST = 60  # Characters of a text, such as a chat template, that are shown


@dataclass(frozen=True)
class Difference:
    """One field in which two identities differ."""

    field: str
    here: Any
    there: Any

    def __str__(self) -> str:
        if self.field.rpartition(".")[2] == "package":
            name, _, release = str(self.here).rpartition(" ")
            is_release = str(self.there).rpartition(" ")[0] == name
            return f"{self.field}: {self.there} -> {release if is_release else self.here}"
        return f"{self.field}: {_shown(self.here)} here, {_shown(self.there)} there"


def differences(identity: Mapping[str, Any], other_identity: Mapping[str, Any]) -> list[Difference]:
    """List every leaf that differs between the two nested mappings, and every branch that only one
    of them has, sorted by name.

    Sources are compared by their pinned content, so the diff names changed files.
    """
    return sorted(
        _differences("", identity, other_identity), key=lambda difference: difference.field
    )


def _differences(name: str, value: Any, other_value: Any) -> Iterator[Difference]:
    values, other_values = dict(_children(value)), dict(_children(other_value))
    if values and other_values:
        for child in {**values, **other_values}:
            field = f"{name}.{child}" if name else child
            pair = values.get(child, ABSENT), other_values.get(child, ABSENT)
            yield from _differences(field, *pair)
    elif value != other_value:
        yield Difference(name, value, other_value)


def _children(value: Any) -> list[tuple[str, Any]]:
    # A list of plain values is one leaf.
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        return [(str(name), inner) for name, inner in members.items()]
    if isinstance(value, list | tuple):
        entries = cast("list[Any]", value)
        if all(isinstance(entry, Mapping) for entry in entries):
            # By name, as an entry that is inserted would shift the numbers of all after it.
            return [(str(e.get("name") or i), e) for i, e in enumerate(entries)]
    return []


def _shown(value: Any) -> str:
    if fields := _children(value):
        return f"{len(fields)} fields" if isinstance(value, Mapping) else f"{len(fields)} entries"
    text = str(value)
    is_digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    if is_digest:
        return text[:12] + "…"
    first, *more_lines = text.splitlines() or [""]
    return (
        f"{first[:LONGEST]}… ({len(text):,} characters)" if more_lines or first[LONGEST:] else text
    )
