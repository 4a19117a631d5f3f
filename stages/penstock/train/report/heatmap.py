"""Heat maps by layer and step, or by layer and expert.

All tiles of one shade are a single SVG path, so a heat map is small and uses the page's colors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.train.report.axis import Axis, Scale, Tick, build_step_ticks
from penstock.train.report.chart import VIEWBOX
from penstock.train.report.format import number

SHADES = 9
MAX_COLUMNS = 120
"""Maximum columns; a longer run is averaged over intervals."""
MAX_ROW_LABELS = 9
"""Maximum number of row labels."""
OVERLAP = 1.5
"""Units by which tiles overlap, to hide seams."""


@dataclass(frozen=True)
class HeatMap:
    """Tiles, ready to render."""

    name: str
    title: str
    note: str
    shades: list[str]
    """One SVG path per shade, palest first; empty if no tile has that shade."""
    low: str
    high: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    tooltip: dict[str, Any]


def layer_step_map(
    name: str,
    title: str,
    rows: Sequence[str],
    steps: Sequence[int],
    values: Sequence[Sequence[float]],
    *,
    note: str = "",
    scale: Scale = "linear",
    palest: float | None = None,
) -> HeatMap:
    """`values` has, for each of `steps`, one number per row. `palest`: a value at which the palest
    shade starts, whatever the data."""
    count = min(len(steps), MAX_COLUMNS)
    ends = [(i + 1) * len(steps) // count for i in range(count)]
    starts = [0, *ends[:-1]]
    table = [
        [_mean([values[index][row] for index in range(start, end)]) for row in range(len(rows))]
        for start, end in zip(starts, ends, strict=True)
    ]
    names = [
        f"step {steps[start]:,}"
        if end - start == 1
        else f"steps {steps[start]:,} to {steps[end - 1]:,}"
        for start, end in zip(starts, ends, strict=True)
    ]
    ticks = build_step_ticks(Axis(steps[0], steps[-1], "linear")) if len(steps) > 1 else []
    return _build_map(name, title, note, rows, names, table, scale, ticks, palest)


def layer_expert_map(
    name: str, title: str, rows: Sequence[str], values: Sequence[Sequence[float]], *, note: str = ""
) -> HeatMap:
    """`values` has, for each row, one fraction per expert, of which 0 is the palest."""
    experts = len(values[0])
    table = [[row[expert] for row in values] for expert in range(experts)]
    every = max(1, -(-experts // 8))
    ticks = [
        Tick(100 * (expert + 0.5) / experts, f"expert {expert}" if expert == 0 else str(expert))
        for expert in range(0, experts, every)
    ]
    columns = [f"expert {expert}" for expert in range(experts)]
    return _build_map(name, title, note, rows, columns, table, "linear", ticks, 0.0)


def _build_map(
    name: str,
    title: str,
    note: str,
    rows: Sequence[str],
    columns: Sequence[str],
    table: Sequence[Sequence[float]],
    scale: Scale,
    x_ticks: list[Tick],
    palest: float | None,
) -> HeatMap:
    finite = [v for column in table for v in column if math.isfinite(v)]
    finite += [] if palest is None else [palest]
    if scale == "log" and not all(v > 0 for v in finite):
        scale = "linear"
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    axis = Axis(low, high, scale if finite else "linear")
    paths = [""] * SHADES
    width, height = VIEWBOX / len(columns), VIEWBOX / len(rows)
    for x, column in enumerate(table):
        for y, value in enumerate(column):
            if math.isfinite(value):
                shade = min(SHADES - 1, int(axis.position(value) * SHADES / 100))
                paths[shade] += (
                    f"M{x * width:.1f} {y * height:.1f}h{width + OVERLAP:.1f}"
                    f"v{height + OVERLAP:.1f}h-{width + OVERLAP:.1f}z"
                )
    every = max(1, -(-len(rows) // MAX_ROW_LABELS))
    return HeatMap(
        name=name,
        title=title,
        note=note,
        shades=paths,
        low=number(low),
        high=number(high),
        x_ticks=x_ticks,
        y_ticks=[
            Tick(100 * (row + 0.5) / len(rows), rows[row]) for row in range(0, len(rows), every)
        ],
        tooltip={
            "rows": list(rows),
            "columns": list(columns),
            "table": [[_rounded(value) for value in column] for column in table],
        },
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
