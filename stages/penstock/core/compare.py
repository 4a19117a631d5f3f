"""What differs between two identities, field by field, in words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One place where two identities disagree."""

    field: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.here)} here, {_shown(self.there)} there"


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[Difference]:
    """Every leaf in which the two nested mappings differ, in order of their names.

    Sources are compared by what they pin, so that a changed file is named.
    """
    mine, theirs = dict(_leaves(here)), dict(_leaves(there))
    return [
        Difference(name, mine.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted({*mine, *theirs})
        if mine.get(name, ABSENT) != theirs.get(name, ABSENT)
    ]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        for index, inner in enumerate(value):
            name = str(inner.get("name", index)) if isinstance(inner, Mapping) else str(index)
            yield from _leaves(inner, f"{prefix}.{name}")
    else:
        yield prefix, value


def _shown(value: Any) -> str:
    text = str(value)
    is_digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return text[:12] + "…" if is_digest else text
