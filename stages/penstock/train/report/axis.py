"""Chart axes: value ranges and tick marks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log"]

LOG_SPAN = 30.0
"""Ratio of maximum to minimum above which a positive curve gets a logarithmic axis."""
MIN_LABEL_GAP = 15
"""Width of the axis name in per cent of a small chart."""


@dataclass(frozen=True)
class Tick:
    """A label and its position, in per cent from the left or from the top."""

    percent: float
    label: str


class Axis:
    """A value range mapped to 0 to 100 per cent."""

    def __init__(self, low: float, high: float, scale: Scale) -> None:
        self.low, self.high, self.scale = low, high, scale
        self._low, self._high = self._transform(low), self._transform(high)
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5

    def position(self, value: float) -> float:
        """Position in per cent between the low and the high end."""
        return 100 * (self._transform(value) - self._low) / (self._high - self._low)

    @property
    def limits(self) -> tuple[float, float]:
        """The values at 0 and 100 per cent; log10 of them on a logarithmic axis."""
        return self._low, self._high

    def _transform(self, value: float) -> float:
        return math.log10(value) if self.scale == "log" else value


def build_y_axis(values: list[float], label: Callable[[float], str]) -> tuple[Axis, list[Tick]]:
    """The y axis of a curve with these finite values, possibly none."""
    finite = values or [0.0]
    low, high = min(finite), max(finite)
    scale: Scale = "log" if low > 0 and high / low >= LOG_SPAN else "linear"
    marks = log_ticks(low, high) if scale == "log" else linear_ticks(low, high, 5)
    axis = Axis(min(low, marks[0]), max(high, marks[-1]), scale)
    return axis, [Tick(100 - axis.position(mark), label(mark)) for mark in marks]


def build_step_ticks(axis: Axis) -> list[Tick]:
    """Round step numbers; the first one with the axis name if there is room."""
    first, last = round(axis.low), round(axis.high)
    marks = [m for m in linear_ticks(first, last, 5) if first < m <= last and m == round(m)]
    ticks = [Tick(axis.position(mark), f"{mark:,.0f}") for mark in marks]
    if not ticks or ticks[0].percent > MIN_LABEL_GAP:
        ticks.insert(0, Tick(axis.position(first), f"step {first:,}"))
    return ticks


def linear_ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers, the outermost of which enclose the range."""
    if low == high:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    # Rounding of `rough` must not skip a step that fits.
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; only powers of ten for a wide range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 3 else (1,)
    marks = [m * 10.0**p for p in powers for m in factors]
    return [m for m in marks if low <= m <= high] or [low, high]
