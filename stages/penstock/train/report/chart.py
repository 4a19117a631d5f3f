"""SVG charts: lines and bars in per cent of the plot area.

Charts are stretched to the width of the page, so lines are SVG paths in a square of 1000 x 1000
units with non-scaling strokes, and labels are text positioned in per cent. Charts are rendered here
and visible without scripts; the tooltip script reads the numbers embedded in the page.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.train.report.axis import Axis, Tick, build_step_ticks, build_y_axis, linear_ticks
from penstock.train.report.format import amount

VIEWBOX = 1000
"""Side of the SVG square in units."""
MAX_POINTS = 600
"""Maximum points per line; a longer run is drawn by the minimum and maximum of each interval."""
SMOOTHING_SHARE = 0.01
"""Smoothing radius as a fraction of the run."""
BAR_GAP = 0.1
"""Gap on either side of a bar as a fraction of its slot."""
MAX_LABELS = 5
"""Maximum number of labels below a bar chart."""

Kind = Literal["line", "raw and smooth", "dots"]
Unit = Literal["number", "amount", "share", "GiB", "seconds"]


@dataclass(frozen=True)
class Series:
    """One metric of one run by step."""

    label: str
    table: str
    """Where the page has its numbers: `steps` or `evaluations` of a run, as `0.steps`."""
    column: str
    steps: Sequence[int]
    values: Sequence[float]
    color: int
    kind: Kind = "line"


@dataclass(frozen=True)
class ChartLine:
    """A series as SVG paths."""

    label: str
    color: int
    raw: str
    """The values as logged."""
    smooth: str
    """The smoothed values; empty if not drawn."""
    dots: str
    """Single points, drawn as round line caps."""
    value: str
    """The last value, formatted."""


@dataclass(frozen=True)
class Chart:
    """Several series by step, ready to render."""

    name: str
    title: str
    note: str
    is_log: bool
    is_point: bool
    """Whether there is only a single value."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[ChartLine]
    tooltip: dict[str, Any]
    """Data of the tooltip script."""


@dataclass(frozen=True)
class Bar:
    """A bar as an SVG path, with its label."""

    path: str
    text: str


@dataclass(frozen=True)
class BarChart:
    """Counts of ordered categories, ready to render."""

    title: str
    note: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    bars: list[Bar]


def build_chart(
    name: str,
    title: str,
    series: Sequence[Series],
    label: Callable[[float], str],
    *,
    unit: Unit = "number",
    note: str = "",
) -> Chart:
    """Draw all `series`: at least one, each with at least one value.

    `unit` determines the number format of the tooltip.
    """
    steps = [step for line in series for step in (line.steps[0], line.steps[-1])]
    x_axis = Axis(min(steps), max(steps), "linear")
    finite = [value for line in series for value in line.values if math.isfinite(value)]
    y_axis, y_ticks = build_y_axis(finite, label)
    return Chart(
        name=name,
        title=title,
        note=note,
        is_log=y_axis.scale == "log",
        is_point=len(series) == len(series[0].values) == 1,
        x_ticks=build_step_ticks(x_axis),
        y_ticks=y_ticks,
        lines=[_draw_line(line, x_axis, y_axis, label) for line in series],
        tooltip={
            "x": [x_axis.low, x_axis.high],
            "y": list(y_axis.limits),
            "bend": y_axis.scale,
            "unit": unit,
            "series": [
                {"label": s.label, "table": s.table, "column": s.column, "last": s.steps[-1]}
                for s in series
            ],
        },
    )


def build_bar_chart(
    title: str, counts: Sequence[tuple[str, str, int]], *, note: str = ""
) -> BarChart:
    """Draw one bar for each (short name, name, count); at least one."""
    marks = linear_ticks(0, max(1, *(count for *_, count in counts)), 3)
    y_axis = Axis(0, marks[-1], "linear")
    width = 100 / len(counts)
    bars = [
        Bar(
            f"{move_to(width * (slot + BAR_GAP), 100)}"
            f"V{(100 - y_axis.position(count)) * VIEWBOX / 100:.1f}"
            f"H{width * (slot + 1 - BAR_GAP) * VIEWBOX / 100:.1f}V{VIEWBOX}Z",
            f"{name}: {count:,}",
        )
        for slot, (_, name, count) in enumerate(counts)
        if count
    ]
    every = -(-len(counts) // MAX_LABELS)
    return BarChart(
        title=title,
        note=note,
        x_ticks=[
            # The shortest length range is labeled at its left edge.
            Tick(width * (slot + (0.5 if short == name else 0.0)), short)
            for slot, (short, name, _) in enumerate(counts)
            if not slot % every
        ],
        y_ticks=[
            Tick(100 - y_axis.position(mark), amount(mark)) for mark in marks if mark == round(mark)
        ],
        bars=bars,
    )


def sample_indices(count: int) -> list[int]:
    """At most MAX_POINTS evenly spaced indices below `count`, including the last one."""
    stretches = min(count, MAX_POINTS)
    return [(i + 1) * count // stretches - 1 for i in range(stretches)]


def min_max_points(values: Sequence[float]) -> Iterator[tuple[int, float]]:
    """(index, value) of the points to draw: all of a short run, else each interval's minimum and
    maximum."""
    if len(values) <= MAX_POINTS:
        yield from enumerate(values)
        return
    start = 0
    for last in sample_indices(len(values)):
        stretch = range(start, last + 1)
        finite = [i for i in stretch if math.isfinite(values[i])]
        # Both extremes, so that a spike of one step is seen however long the run is.
        chosen = (
            {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            if finite
            else {last}
        )
        yield from ((i, values[i]) for i in sorted(chosen))
        start = last + 1


def smooth_values(values: Sequence[float]) -> list[float]:
    """The mean around each point with weights exp(-|distance| / (SMOOTHING_SHARE of the run)).

    Symmetric, so it does not lag behind a falling loss. Non-finite values have weight zero.
    """
    keep = math.exp(-1 / max(1.0, SMOOTHING_SHARE * len(values)))
    before, after = _decayed_sums(values, keep), _decayed_sums(values[::-1], keep)[::-1]
    averages: list[float] = []
    for value, (past, past_weight), (future, future_weight) in zip(
        values, before, after, strict=True
    ):
        own, own_weight = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)
        weight = past_weight + future_weight - own_weight
        averages.append((past + future - own) / weight if weight else 0.0)
    return averages


def move_to(x: float, y: float) -> str:
    """The SVG move command; both coordinates in per cent."""
    return f"M{x * VIEWBOX / 100:.1f} {y * VIEWBOX / 100:.1f}"


def _draw_line(
    series: Series, x_axis: Axis, y_axis: Axis, label: Callable[[float], str]
) -> ChartLine:
    steps, values = series.steps, series.values

    def place(index: int, value: float) -> tuple[float, float] | None:
        if not math.isfinite(value):
            return None
        # A smoothed value at a non-finite one may lie outside the axis range.
        return x_axis.position(steps[index]), min(100.0, max(0.0, 100 - y_axis.position(value)))

    raw = _path([place(i, v) for i, v in min_max_points(values)])
    smooth, dots = "", ""
    if series.kind == "raw and smooth" and len(values) > 1:
        averaged = smooth_values(values)
        if any(map(math.isfinite, values)):
            smooth = _path([place(i, averaged[i]) for i in sample_indices(len(values))])
    elif series.kind == "dots" or len(values) == 1:
        points = [place(i, v) for i, v in enumerate(values)]
        dots = " ".join(f"{move_to(*point)}h0" for point in points if point)
    return ChartLine(series.label, series.color, raw, smooth, dots, label(values[-1]))


def _decayed_sums(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """For each point, the decayed sum of the values up to it, and the sum of their weights."""
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total, keep * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1.0
        sums.append((total, weight))
    return sums


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Lines between consecutive points, interrupted at None."""
    parts: list[str] = []
    pen = "up"
    for point in points:
        if point is None:
            pen = "up"
            continue
        command = move_to(*point)
        # A zero-length line after the move makes a single point visible.
        parts.append(f"{command}h0" if pen == "up" else f"L{command[1:]}")
        pen = "down"
    return "".join(parts)
