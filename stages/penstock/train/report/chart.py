"""From numbers to what a page draws: lines, round ticks and places, in per cent of the plot.

Charts are stretched to whatever width the page has, so lines are SVG paths in a square of 1000 x
1000 units with strokes that do not scale, and labels are text placed in per cent beside it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

SIDE = 1000
"""Units of the square that paths are drawn in."""
MOST_POINTS = 600
"""Points of one line; a longer run is drawn by the extremes of as many stretches of it."""
LOG_SPAN = 30.0
"""Largest over smallest value from which on a positive curve is drawn on a logarithmic scale."""
SMOOTHING_SHARE = 0.01
"""Reach of the smoothed line to either side, as a share of the run."""
BAR_GAP = 0.1
"""Free space on either side of a bar, as a share of its room."""
MOST_NAMES = 5
"""Names below a bar chart for which there is room."""
ROOM_FOR_NAME = 15
"""Per cent of the width that the axis's name takes, on a small chart."""


@dataclass(frozen=True)
class Tick:
    """A label and its place, per cent from the left or from the top."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """One quantity over the steps, ready to be drawn."""

    name: str
    title: str
    scale: Literal["linear", "log"]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    raw: str
    """SVG path of the values as logged."""
    smooth: str
    """SVG path of their moving average; empty where none is drawn."""
    dots: str
    """SVG path of single points, drawn by round line caps."""
    places: list[float | None]
    """Per cent from the top of the values at the shown steps; None for one that is not finite."""


@dataclass(frozen=True)
class BarChart:
    """How many there are of each of several kinds, in a given order, ready to be drawn."""

    title: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    bars: str
    """SVG path of all bars."""


class Axis:
    """A range of values laid over 0 to 100 per cent."""

    def __init__(self, low: float, high: float, scale: Literal["linear", "log"]) -> None:
        self.scale: Literal["linear", "log"] = scale
        self._low, self._high = self._bent(low), self._bent(high)
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5

    def at(self, value: float) -> float:
        """Per cent of the way from the low end to the high end."""
        return 100 * (self._bent(value) - self._low) / (self._high - self._low)

    def _bent(self, value: float) -> float:
        return math.log10(value) if self.scale == "log" else value


def chart(
    name: str,
    title: str,
    steps: Sequence[int],
    values: Sequence[float],
    shown: Sequence[int],
    label: Callable[[float], str],
    *,
    line: Literal["raw", "raw and smooth"] = "raw",
    points: Sequence[tuple[int, float]] = (),
) -> Chart:
    """Draw `values` over `steps` (both of one length, at least 1), and `points` as dots.

    `shown` are the indices whose places a pointer can ask for.
    """
    finite = [v for v in (*values, *(value for _, value in points)) if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    scale = "log" if low > 0 and high / low >= LOG_SPAN else "linear"
    y_marks = log_marks(low, high) if scale == "log" else round_marks(low, high, 5)
    across = Axis(steps[0], steps[-1], "linear")
    up = Axis(min(low, y_marks[0]), max(high, y_marks[-1]), scale)

    def place(step: float, value: float) -> tuple[float, float]:
        return across.at(step), 100 - up.at(value)

    averaged = smoothed(values) if line == "raw and smooth" else []
    marks = [(s, v) for s, v in points if math.isfinite(v)]
    return Chart(
        name=name,
        title=title,
        scale=scale,
        x_ticks=_step_ticks(across, steps[0], steps[-1]),
        y_ticks=[Tick(100 - up.at(mark), label(mark)) for mark in y_marks],
        raw=_path([place(steps[i], v) if math.isfinite(v) else None for i, v in extremes(values)]),
        smooth=_path([place(steps[i], averaged[i]) for i in shown] if averaged else []),
        dots=" ".join(f"{_move(*place(s, v))}h0" for s, v in marks),
        places=[
            round(100 - up.at(values[i]), 3) if math.isfinite(values[i]) else None for i in shown
        ],
    )


def bar_chart(
    title: str, counts: Sequence[tuple[str, int]], label: Callable[[float], str]
) -> BarChart:
    """Draw one bar for each (name, count), of which there is at least one."""
    marks = round_marks(0, max(1, *(count for _, count in counts)), 3)
    up = Axis(0, marks[-1], "linear")
    width = 100 / len(counts)
    bars = [
        f"{_move(width * (at + BAR_GAP), 100)}V{(100 - up.at(count)) * SIDE / 100:.1f}"
        f"H{width * (at + 1 - BAR_GAP) * SIDE / 100:.1f}V{SIDE}Z"
        for at, (_, count) in enumerate(counts)
        if count
    ]
    every = -(-len(counts) // MOST_NAMES)
    return BarChart(
        title=title,
        x_ticks=[
            Tick(width * (at + 0.5), name) for at, (name, _) in enumerate(counts) if not at % every
        ],
        y_ticks=[Tick(100 - up.at(mark), label(mark)) for mark in marks if mark == round(mark)],
        bars="".join(bars),
    )


def shown_indices(count: int) -> list[int]:
    """At most MOST_POINTS indices below `count`, evenly apart, the last one among them."""
    stretches = min(count, MOST_POINTS)
    return [(i + 1) * count // stretches - 1 for i in range(stretches)]


def extremes(values: Sequence[float]) -> Iterator[tuple[int, float]]:
    """(index, value) of what a line needs: all of a short run, else each stretch's low and high."""
    if len(values) <= MOST_POINTS:
        yield from enumerate(values)
        return
    start = 0
    for last in shown_indices(len(values)):
        stretch = range(start, last + 1)
        finite = [i for i in stretch if math.isfinite(values[i])]
        chosen = (
            {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            if finite
            else {last}
        )
        yield from ((i, values[i]) for i in sorted(chosen))
        start = last + 1


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean around each place with weights exp(-|distance| / (SMOOTHING_SHARE of the run)).

    Looking both ways, it does not lag behind a falling loss. Values that are not finite weigh
    nothing.
    """
    keep = math.exp(-1 / max(1.0, SMOOTHING_SHARE * len(values)))
    before, after = _decayed(values, keep), _decayed(values[::-1], keep)[::-1]
    averages: list[float] = []
    for value, (left, left_weight), (right, right_weight) in zip(
        values, before, after, strict=True
    ):
        own, own_weight = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)
        weight = left_weight + right_weight - own_weight
        averages.append((left + right - own) / weight if weight else 0.0)
    return averages


def _decayed(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """For each place the weighted sum of the values up to it, and the sum of their weights."""
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total, keep * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1.0
        sums.append((total, weight))
    return sums


def round_marks(low: float, high: float, about: int) -> list[float]:
    """Round numbers, `about` as many, of which the outermost enclose the range."""
    if low == high:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]


def log_marks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; only the powers where they are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 3 else (1,)
    marks = [m * 10.0**p for p in powers for m in factors]
    return [m for m in marks if low <= m <= high] or [low, high]


def _step_ticks(across: Axis, first: int, last: int) -> list[Tick]:
    """Round steps, and the first one with the axis's name where there is room for it."""
    marks = [m for m in round_marks(first, last, 5) if first < m <= last and m == round(m)]
    ticks = [Tick(across.at(mark), f"{mark:,.0f}") for mark in marks]
    if not ticks or ticks[0].at > ROOM_FOR_NAME:
        ticks.insert(0, Tick(across.at(first), f"step {first:,}"))
    return ticks


def _move(x: float, y: float) -> str:
    return f"M{x * SIDE / 100:.1f} {y * SIDE / 100:.1f}"


def _path(places: Sequence[tuple[float, float] | None]) -> str:
    """Lines from place to place, broken at None."""
    parts: list[str] = []
    pen = "up"
    for place in places:
        if place is None:
            pen = "up"
            continue
        move = _move(*place)
        # A move followed by a line of no length, so that a single point is seen too.
        parts.append(f"{move}h0" if pen == "up" else f"L{move[1:]}")
        pen = "down"
    return "".join(parts)
