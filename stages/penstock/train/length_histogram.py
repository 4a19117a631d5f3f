"""Sequence length histogram with linear or logarithmic bins."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]

MOST_BARS = 24
WIDE = 16.0
"""Ratio of the longest to the shortest usual length above which bins are logarithmic."""
UNUSUAL = 0.005
"""Fraction of samples at each end that may be outliers; they share one extra bin at that end."""
FAR = 2.0
"""Lengths are outliers if they reach beyond this multiple of the usual range."""

PERCENTILES = {"shortest": 0, "median": 50, "90%": 90, "99%": 99, "longest": 100}


def length_histogram(lengths: Lengths) -> dict[str, Any]:
    """Return `edges` (one more than bins; half-open bins), `counts`, and `percentiles` by name.
    Requires at least one length; all lengths must be positive."""
    up_to = np.bincount(lengths).cumsum()
    edges = _edges(up_to)
    counts = np.diff(up_to[np.minimum(np.array(edges), len(up_to)) - 1])
    return {
        "edges": edges,
        "counts": counts.tolist(),
        "percentiles": {name: _percentile(up_to, part) for name, part in PERCENTILES.items()},
    }


def bar_names(edges: list[int]) -> Iterator[str]:
    """The length range of each bin."""
    for low, end in pairwise(edges):
        yield f"{low:,}" if end == low + 1 else f"{low:,} to {end - 1:,}"


def _percentile(up_to: Lengths, part: float) -> int:
    """The smallest length that is at least `part` per cent of all. `up_to` is the cumulative count
    by length, from 0."""
    return int(np.searchsorted(up_to, max(1, math.ceil(up_to[-1] * part / 100))))


def _edges(up_to: Lengths) -> list[int]:
    low, high = _percentile(up_to, 0), len(up_to) - 1
    first, last = _percentile(up_to, 100 * UNUSUAL), _percentile(up_to, 100 - 100 * UNUSUAL)
    if high - low <= FAR * max(MOST_BARS, last - first):
        first, last = low, high
    edges = _growing(first, last) if last >= WIDE * first else _equal(first, last)
    before, behind = [low] * (low < edges[0]), [high + 1] * (high >= edges[-1])
    return [*before, *edges, *behind]


def _equal(first: int, last: int) -> list[int]:
    """Linear bin edges at multiples of a round width, the first at most `first` and the last above
    `last`."""
    rough = (last + 1 - first) / MOST_BARS
    power = 10 ** max(0, math.floor(math.log10(rough))) if rough > 1 else 1
    width = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    start = first // width * width
    return [max(1, start), *range(start + width, last + width + 1, width)]


def _growing(first: int, last: int) -> list[int]:
    """Logarithmic bin edges with two significant digits."""
    marks = np.geomspace(first, last + 1, MOST_BARS + 1)[1:-1]
    inner = {int(float(f"{mark:.1e}")) for mark in marks}
    return [first, *sorted(edge for edge in inner if first < edge <= last), last + 1]
