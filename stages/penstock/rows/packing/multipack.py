"""Multipack: as few rows as possible, with samples mixed as in random rows.

Bin packing that fills rows well puts samples of similar length together, and a model trains worse
if all short samples come at once. So rows swap samples: each offers a random subset, rows whose
subsets have about equally many tokens are paired, and the subsets are swapped.
"""

import math
from itertools import islice

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import PackingPlan, Sizes, join, one_per_row
from penstock.rows.packing.best_fit import Patterns
from penstock.rows.packing.exact import search_best
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.packing.random_start import random_starts, repack
from penstock.rows.packing.rows import Rows, build_rows, row_starts
from penstock.rows.packing.sorting import count_values, stable_argsort

# Maximum samples that are packed together. Larger groups are split into random blocks, which bounds
# memory and costs less than one row.
BLOCK = 1 << 20

CLOSE = 10_000
"""A plan within one row per `CLOSE` rows of the lower bound ends the search."""

# With fewer samples there are more rounds of mixing: there are fewer rows to swap with, and it
# takes almost no time.
THOROUGH = 240_000


def multipack(
    lengths: npt.ArrayLike, capacity: int, group_size: int, rng: np.random.Generator
) -> PackingPlan:
    """Pack random samples into few rows, in random order.

    Samples are packed in groups of `group_size` consecutive samples; groups share no row. With 1,
    every sample has its own row and the order is kept. The result depends only on the lengths and
    the state of `rng`, on every machine. Raises ValueError for a length above `capacity` or below
    1.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.max() > capacity or sizes.min() < 1):
        raise ValueError(f"lengths from {sizes.min()} to {sizes.max()} for rows of {capacity}")
    if group_size == 1:
        return one_per_row(len(sizes))
    parts: list[PackingPlan] = []
    for start in range(0, len(sizes), group_size):
        group = sizes[start : start + group_size].astype(np.min_scalar_type(capacity))
        samples = np.arange(len(group), dtype=np.min_scalar_type(len(group)))
        rng.shuffle(samples)
        for block in np.array_split(samples, -(-len(group) // BLOCK)):
            parts.append(_best(group, block, capacity, rng).bins(start, rng))
    return join(parts)


def _best(lengths: Sizes, samples: Sizes, capacity: int, rng: np.random.Generator) -> Rows:
    """A random start if it has no more rows than the best plan, else the plan with more mixing."""
    sizes = lengths[samples]
    counts = count_values(sizes, capacity)
    least = fewest_rows(counts, capacity)
    thorough = THOROUGH / len(samples)
    plan: Patterns | None = None
    tries = 1 + min(2, int(thorough))
    starts = random_starts(samples, sizes, counts, capacity, least, rng)
    for placed, widths, totals in islice(starts, tries):
        rows = Rows(lengths, placed, row_starts(widths), widths, totals, capacity)
        repack(rows, least, 0.02, choices=())
        if rows.num_rows > least:
            plan = plan or search_best(counts, capacity, least + least // CLOSE)
            repack(rows, plan.num_rows, 0.1)
        if plan is None or rows.num_rows <= plan.num_rows:
            _exchange(rows, min(60, int(3 * thorough)), rng)
            return rows
    plan = plan or search_best(counts, capacity, least + least // CLOSE)
    rows = build_rows(lengths, samples, plan, capacity)
    rounds = int(15 * min(8.0, max(1.0, math.sqrt(thorough))))
    _exchange(rows, rounds, rng)
    if rows.num_rows > least:
        # After mixing, the rows that are not full can be packed better than at first.
        repack(rows, least, 0.1)
        _exchange(rows, rounds // 3, rng)
    return rows


def _exchange(rows: Rows, rounds: int, rng: np.random.Generator) -> None:
    """Swap random subsets of samples between pairs of rows, in place, for `rounds` rounds.

    Each sample is offered with a probability that is random per row, so that subsets of all sizes
    occur. Subsets may differ in tokens by as much as the receiving row has room for.
    """
    if not rounds:
        return
    num_rows, totals = rows.num_rows, rows.totals
    row = np.repeat(np.arange(num_rows), rows.widths)
    rows.samples = rows.samples_in(np.arange(num_rows))
    sizes = rows.lengths[rows.samples]
    for _ in range(rounds):
        chance = np.frombuffer(rng.bytes(num_rows), dtype=np.uint8)
        coins = np.frombuffer(rng.bytes(len(row)), dtype=np.uint8)
        offered = coins < chance[row]
        # With weights, bincount sums in float64, which is exact for integers below 2**53.
        parts = np.bincount(row, sizes * offered, num_rows).astype(np.int64)
        shuffled = rng.permutation(num_rows)
        by_part = shuffled[stable_argsort(parts[shuffled], rows.capacity)]
        # Adjacent rows in this order swap; a random offset varies which rows are paired.
        start = int(rng.integers(2))
        pairs = by_part[start : start + (num_rows - start) // 2 * 2].reshape(-1, 2)
        gains = parts[pairs[:, 1]] - parts[pairs[:, 0]]
        fit = np.flatnonzero(totals[pairs[:, 0]] + gains <= rows.capacity)
        ones, second_rows = pairs[fit].T
        totals[ones] += gains[fit]
        totals[second_rows] -= gains[fit]
        # Target row of each row's samples: first half for samples kept, second half for offered.
        target = np.tile(np.arange(num_rows), 2)
        target[num_rows + ones], target[num_rows + second_rows] = second_rows, ones
        row = target[row + num_rows * offered]
    widths = np.bincount(row, minlength=num_rows)
    # Drop rows that became empty.
    nonempty = np.flatnonzero(widths)
    rows.samples = rows.samples[stable_argsort(row, num_rows)]
    rows.widths, rows.totals = widths[nonempty], totals[nonempty]
    rows.starts = row_starts(rows.widths)
