"""Maps of a quantity by layer and step, or by layer and expert: tiles in some shades.

Tiles of one shade are one SVG path, so a map is small and takes the page's colours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.train.report.chart import SIDE
from penstock.train.report.format import number
from penstock.train.report.scale import Axis, Bend, Tick, of_steps

SHADES = 9
MOST_COLUMNS = 120
"""A longer run is shown by the means of as many stretches of it."""
MOST_ROW_NAMES = 9
"""Names beside the rows for which there is room."""
OVERLAP = 1.5
"""Units that a tile reaches into the next ones, so that no seams are seen between them."""


@dataclass(frozen=True)
class HeatMap:
    """Tiles, ready to be drawn."""

    name: str
    title: str
    note: str
    shades: list[str]
    """One SVG path for each shade, the palest first; empty where no tile has it."""
    low: str
    high: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    pointed_at: dict[str, Any]


def over_steps(
    name: str,
    title: str,
    rows: Sequence[str],
    steps: Sequence[int],
    values: Sequence[Sequence[float]],
    *,
    note: str = "",
    bend: Bend = "linear",
    palest: float | None = None,
) -> HeatMap:
    """`values` has, for each of `steps`, one number for each of `rows`. `palest`: a value that the
    shades begin with, whatever is found."""
    count = min(len(steps), MOST_COLUMNS)
    ends = [(i + 1) * len(steps) // count for i in range(count)]
    starts = [0, *ends[:-1]]
    table = [
        [_mean([values[at][row] for at in range(start, end)]) for row in range(len(rows))]
        for start, end in zip(starts, ends, strict=True)
    ]
    names = [
        f"step {steps[start]:,}"
        if end - start == 1
        else f"steps {steps[start]:,} to {steps[end - 1]:,}"
        for start, end in zip(starts, ends, strict=True)
    ]
    ticks = of_steps(Axis(steps[0], steps[-1], "linear")) if len(steps) > 1 else []
    return _map(name, title, note, rows, names, table, bend, ticks, palest)


def by_expert(
    name: str, title: str, rows: Sequence[str], values: Sequence[Sequence[float]], *, note: str = ""
) -> HeatMap:
    """`values` has, for each of `rows`, one share for each expert, of which 0 is the palest."""
    experts = len(values[0])
    table = [[row[expert] for row in values] for expert in range(experts)]
    every = max(1, -(-experts // 8))
    ticks = [
        Tick(100 * (at + 0.5) / experts, f"expert {at}" if at == 0 else str(at))
        for at in range(0, experts, every)
    ]
    columns = [f"expert {at}" for at in range(experts)]
    return _map(name, title, note, rows, columns, table, "linear", ticks, 0.0)


def _map(
    name: str,
    title: str,
    note: str,
    rows: Sequence[str],
    columns: Sequence[str],
    table: Sequence[Sequence[float]],
    bend: Bend,
    x_ticks: list[Tick],
    palest: float | None,
) -> HeatMap:
    finite = [v for column in table for v in column if math.isfinite(v)]
    finite += [] if palest is None else [palest]
    if bend == "log" and not all(v > 0 for v in finite):
        bend = "linear"
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    axis = Axis(low, high, bend if finite else "linear")
    paths = [""] * SHADES
    width, height = SIDE / len(columns), SIDE / len(rows)
    for x, column in enumerate(table):
        for y, value in enumerate(column):
            if math.isfinite(value):
                shade = min(SHADES - 1, int(axis.at(value) * SHADES / 100))
                paths[shade] += (
                    f"M{x * width:.1f} {y * height:.1f}h{width + OVERLAP:.1f}"
                    f"v{height + OVERLAP:.1f}h-{width + OVERLAP:.1f}z"
                )
    every = max(1, -(-len(rows) // MOST_ROW_NAMES))
    return HeatMap(
        name=name,
        title=title,
        note=note,
        shades=paths,
        low=number(low),
        high=number(high),
        x_ticks=x_ticks,
        y_ticks=[Tick(100 * (at + 0.5) / len(rows), rows[at]) for at in range(0, len(rows), every)],
        pointed_at={
            "rows": list(rows),
            "columns": list(columns),
            "table": [[_brief(value) for value in column] for column in table],
        },
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _brief(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
