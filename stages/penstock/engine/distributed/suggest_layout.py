"""The smallest change of settings that makes a layout possible: what an error says to write."""

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

Values = Mapping[str, Any]
"""New values by setting, `train.tensor_parallel_size` and the like."""

MOST_VALUES, MOST_TRIED = 8, 2000
"""Values of one setting, and sets of as many settings, that are tried: the nearest first."""

NOT_BLAMED, WRITTEN = 2.0, 1.0
"""What it adds to a change's size that nothing is wrong with its setting, or that a person wrote
what is changed."""


@dataclass(frozen=True)
class LayoutSuggestion:
    """One setting's other value."""

    field: str
    value: Any
    distance: float
    """From the value it has: doublings of a size, 1 or more for another word."""
    is_written: bool
    """Whether the value it has was written, and is not the default."""


def suggest_change(
    candidates: Iterable[LayoutSuggestion],
    accepted: Callable[[Values], bool],
    blamed: Sequence[str],
    undone: Values | None = None,
) -> Values:
    """The new values that `accepted` takes and that change least; none where it takes none.

    Fewer settings before smaller steps, and `blamed` settings before others. Where three settings
    do not suffice, `undone` is tried, alone and with one other change.
    """

    def size(changes: tuple[LayoutSuggestion, ...]) -> float:
        extra = (
            NOT_BLAMED * (one.field not in blamed) + WRITTEN * one.is_written + one.distance
            for one in changes
        )
        return sum(extra)

    by_field: dict[str, list[LayoutSuggestion]] = {}
    for one in sorted(candidates, key=lambda one: size((one,))):
        by_field.setdefault(one.field, []).append(one)
    near = [several[:MOST_VALUES] for several in by_field.values()]
    for count in (1, 2, 3):
        sets = chain.from_iterable(product(*fields) for fields in combinations(near, count))
        for changes in heapq.nsmallest(MOST_TRIED, sets, key=size):
            values = {one.field: one.value for one in changes}
            if accepted(values):
                return values
    if undone:
        for more in ({}, *({one.field: one.value} for several in near for one in several)):
            if accepted({**undone, **more}):
                return {**undone, **more}
    return {}


def format_suggestion(values: Values, before: str = "\n  Write ") -> str:
    """The change in words: `Write a: 1 and b: 2.`; nothing where there is none."""
    written = [f"{name}: {_yaml(value)}" for name, value in values.items()]
    if not written:
        return ""
    *most, last = written
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"{before}{listed}."


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
