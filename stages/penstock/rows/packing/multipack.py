"""Rows filled as well as can be, and yet as mixed as rows filled at random."""

import math
from itertools import islice

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import PackingPlan, Sizes, alone, join
from penstock.rows.packing.best_of import quickly, tightest
from penstock.rows.packing.exchange import exchange
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.packing.patterns import Patterns
from penstock.rows.packing.random_start import random_starts, repack
from penstock.rows.packing.rows import Rows, planned, row_starts
from penstock.rows.packing.sorting import count_values

BLOCK = 1 << 20
"""Samples whose rows are looked for together. Of more, every block is a random part, which bounds
the memory that is needed and costs less than one row."""

CLOSE = 10_000
"""One row in so many above the bound is not worth another search."""

THOROUGH = 240_000
"""Fewer samples than these are mixed more thoroughly: they have fewer rows to trade with, and it
takes next to no time."""


def multipack(
    lengths: npt.ArrayLike, capacity: int, group_size: int, rng: np.random.Generator
) -> PackingPlan:
    """Few rows of random samples, in random order.

    Rows are formed in groups of `group_size` consecutive samples, which share no row: with 1 every
    sample has a row to itself, and they keep their order. Lengths and the state of `rng` decide the
    rows, on every machine alike. Raises ValueError for a length above `capacity` or below 1.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.max() > capacity or sizes.min() < 1):
        raise ValueError(f"lengths from {sizes.min()} to {sizes.max()} for rows of {capacity}")
    if group_size == 1:
        return alone(len(sizes))
    parts: list[PackingPlan] = []
    for start in range(0, len(sizes), group_size):
        group = sizes[start : start + group_size].astype(np.min_scalar_type(capacity))
        samples = np.arange(len(group), dtype=np.min_scalar_type(len(group)))
        rng.shuffle(samples)
        for block in np.array_split(samples, -(-len(group) // BLOCK)):
            parts.append(_best(group, block, capacity, rng).bins(start, rng))
    return join(parts)


def _best(lengths: Sizes, samples: Sizes, capacity: int, rng: np.random.Generator) -> Rows:
    """A random start if it has no more rows than the best plan, else the plan, mixed for longer."""
    sizes = lengths[samples]
    counts = count_values(sizes, capacity)
    least = fewest_rows(counts, capacity)
    thorough = THOROUGH / len(samples)
    plan: Patterns | None = None
    tries = 1 + min(2, int(thorough))
    starts = random_starts(samples, sizes, counts, capacity, least, rng)
    for placed, widths, totals in islice(starts, tries):
        rows = Rows(lengths, placed, row_starts(widths), widths, totals, capacity)
        repack(rows, least, 0.02, quickly)
        if rows.num_rows > least:
            plan = plan or tightest(counts, capacity, least + least // CLOSE)
            repack(rows, plan.num_rows, 0.1, tightest)
        if plan is None or rows.num_rows <= plan.num_rows:
            exchange(rows, min(60, int(3 * thorough)), rng)
            return rows
    plan = plan or tightest(counts, capacity, least + least // CLOSE)
    rows = planned(lengths, samples, plan, capacity)
    rounds = int(15 * min(8.0, max(1.0, math.sqrt(thorough))))
    exchange(rows, rounds, rng)
    if rows.num_rows > least:
        # Mixed as they are, the rows with room for more pack better than they did at first.
        repack(rows, least, 0.1, tightest)
        exchange(rows, rounds // 3, rng)
    return rows
