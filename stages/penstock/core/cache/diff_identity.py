"""Field-by-field diff of two cache-key identities."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One field in which two identities differ."""

    field: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.here)} here, {_shown(self.there)} there"


def differences(identity: Mapping[str, Any], other_identity: Mapping[str, Any]) -> list[Difference]:
    """List every leaf that differs between the two nested mappings, sorted by name.

    Sources are compared by their pinned content, so the diff names changed files.
    """
    values, other_values = dict(_leaves(identity)), dict(_leaves(other_identity))
    return [
        Difference(name, values.get(name, ABSENT), other_values.get(name, ABSENT))
        for name in sorted({*values, *other_values})
        if values.get(name, ABSENT) != other_values.get(name, ABSENT)
    ]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in _children(value):
        yield from _leaves(inner, f"{prefix}.{name}" if prefix else name)
    if not _children(value):
        yield prefix, value


def _children(value: Any) -> list[tuple[str, Any]]:
    """The children of a mapping or of a list of mappings, by name. A list of plain values is one
    leaf."""
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        return [(str(name), inner) for name, inner in members.items()]
    if isinstance(value, list | tuple):
        entries = cast("list[Any]", value)
        if all(isinstance(entry, Mapping) for entry in entries):
            return [(str(e.get("name") or i), e) for i, e in enumerate(entries)]
    return []


def _shown(value: Any) -> str:
    text = str(value)
    is_digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return text[:12] + "…" if is_digest else text
