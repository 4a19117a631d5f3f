"""One fault of a configuration: where it is, and what a person can do about it."""

import json
from dataclasses import dataclass
from typing import Any

Steps = tuple[str | int, ...]
"""Where a value stands: the names of mappings and the indices of lists that lead to it."""

LONGEST_SHOWN = 60


@dataclass(frozen=True)
class ConfigIssue:
    """What is wrong with the value at `path`. `reads` are other values that the fault rests on:
    while one of those is itself at fault, this fault may be a mere consequence and is not told."""

    path: Steps
    text: str
    reads: tuple[str, ...] = ()


def dotted(path: Steps) -> str:
    """The name a user would type: `data.datasets.0.path`."""
    return ".".join(map(str, path))


def shown(value: Any) -> str:
    """A value as one would write it in YAML, cut when it is long."""
    if isinstance(value, str):
        text = value if value and value.isprintable() and value == value.strip() else repr(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"
