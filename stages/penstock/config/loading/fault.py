"""One error in a config: where it is, and what to write instead."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Path of a value: the names of mappings and the indices of lists that lead to it.
Steps = tuple[str | int, ...]

LONGEST_SHOWN = 60


@dataclass(frozen=True)
class ConfigIssue:
    """An error at `path`. `reads` are other settings that the error depends on: if one of these is
    invalid itself, this error may only be a consequence and is not reported."""

    path: Steps
    text: str
    reads: tuple[str, ...] = ()


Issues = Iterator[ConfigIssue]


def dotted(path: Steps) -> str:
    """The dotted name: `data.datasets.0.path`."""
    return ".".join(map(str, path))


def shown(value: Any) -> str:
    """A value as it is written in YAML, truncated if it is long."""
    if isinstance(value, str):
        text = value if value and value.isprintable() and value == value.strip() else repr(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"
