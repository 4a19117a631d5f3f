"""Suggest a layout: the smallest change of settings that makes a layout valid, for errors."""

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

Values = Mapping[str, Any]
"""New values by setting, such as `train.tensor_parallel_size`."""

MOST_VALUES, MOST_TRIED = 8, 2000
"""The most values tried of one setting, and the most combinations tried for each number of changed
settings; nearest first.
"""

NOT_BLAMED, WRITTEN = 2.0, 1.0
"""The cost of changing a setting that is not blamed, or one that the user wrote."""


@dataclass(frozen=True)
class LayoutSuggestion:
    """Another value of one setting."""

    field: str
    value: Any
    distance: float
    """From the current value: log2 of the ratio of sizes; 1 or more for another choice."""
    is_written: bool
    """Whether the user wrote the current value, instead of leaving the default."""


def suggest_change(
    candidates: Iterable[LayoutSuggestion],
    accepted: Callable[[Values], bool],
    blamed: Sequence[str],
    undone: Values | None = None,
) -> Values:
    """The smallest change that `accepted` accepts; empty if there is none.

    Prefers fewer settings to smaller steps, and `blamed` settings to others. If three settings are
    not enough, `undone` is tried, alone and with one other change.
    """

    def size(changes: tuple[LayoutSuggestion, ...]) -> float:
        return sum(
            NOT_BLAMED * (change.field not in blamed)
            + WRITTEN * change.is_written
            + change.distance
            for change in changes
        )

    by_field: dict[str, list[LayoutSuggestion]] = {}
    for change in sorted(candidates, key=lambda change: size((change,))):
        by_field.setdefault(change.field, []).append(change)
    near = [several[:MOST_VALUES] for several in by_field.values()]
    for count in (1, 2, 3):
        sets = chain.from_iterable(product(*fields) for fields in combinations(near, count))
        for changes in heapq.nsmallest(MOST_TRIED, sets, key=size):
            values = {change.field: change.value for change in changes}
            if accepted(values):
                return values
    if undone:
        for more in ({}, *({change.field: change.value} for several in near for change in several)):
            if accepted({**undone, **more}):
                return {**undone, **more}
    return {}


def format_suggestion(values: Values, before: str = "\n  Write ") -> str:
    """The change as a sentence: `Write a: 1 and b: 2.`; empty if there is none."""
    if not values:
        return ""
    written = [
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
    ]
    *most, last = written
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"{before}{listed}."
