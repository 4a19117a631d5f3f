"""Lengths counted in bars that suit them: equally wide, or each a little wider than the last."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]

MOST_BARS = 24
WIDE = 16.0
"""How many times the shortest usual length the longest one is, from which bars grow in width."""
UNUSUAL = 0.005
"""The share of the samples at either end that may be so far off that bars are not laid out for
them; they are counted in one more bar at that end."""
FAR = 2.0
"""How many times as far as usual lengths all of them have to reach for that."""

PERCENTILES = {"shortest": 0, "median": 50, "90%": 90, "99%": 99, "longest": 100}


def length_histogram(lengths: Lengths) -> dict[str, Any]:
    """`edges` (one more than bars; a bar holds what is at least its edge and below the next one),
    `counts`, and `percentiles` by their names. There has to be a length, and all are positive."""
    up_to = np.bincount(lengths).cumsum()
    edges = _edges(up_to)
    counts = np.diff(up_to[np.minimum(np.array(edges), len(up_to)) - 1])
    return {
        "edges": edges,
        "counts": counts.tolist(),
        "percentiles": {name: _percentile(up_to, part) for name, part in PERCENTILES.items()},
    }


def bar_names(edges: list[int]) -> Iterator[str]:
    """The lengths that each bar holds."""
    for low, end in pairwise(edges):
        yield f"{low:,}" if end == low + 1 else f"{low:,} to {end - 1:,}"


def _percentile(up_to: Lengths, part: float) -> int:
    """The least length that so many per cent of all do not exceed. `up_to` counts those that are
    of each length, from 0, or shorter."""
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
    """Multiples of a round width, the first at most `first` and the last above `last`."""
    rough = (last + 1 - first) / MOST_BARS
    power = 10 ** max(0, math.floor(math.log10(rough))) if rough > 1 else 1
    width = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    start = first // width * width
    return [max(1, start), *range(start + width, last + width + 1, width)]


def _growing(first: int, last: int) -> list[int]:
    """Numbers of two digits that matter, about equally far apart on a logarithmic scale."""
    marks = np.geomspace(first, last + 1, MOST_BARS + 1)[1:-1]
    inner = {int(float(f"{mark:.1e}")) for mark in marks}
    return [first, *sorted(each for each in inner if first < each <= last), last + 1]
