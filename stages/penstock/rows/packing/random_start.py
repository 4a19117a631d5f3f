"""Random packing: most samples in random order, short samples in the gaps.

Next fit of randomly ordered samples leaves a gap at the end of each row. A random half of the short
samples is held back and fills the gaps.
"""

from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

from penstock.rows.bin_plan import Indices, Sizes, next_fit
from penstock.rows.packing.best_fit import best_fit
from penstock.rows.packing.exact import EXACT_CHOICES, Choose, search_best
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.packing.rows import Rows, build_rows, plan_slots, row_starts
from penstock.rows.packing.sorting import count_values, ranges, stable_argsort

Start = tuple[Sizes, Indices, Indices]
"""(samples row by row, number of samples of each row, number of tokens of each row)."""

# Shares of all tokens to hold back, tried from the smallest: less is more random.
SHARES = (0.04, 0.06, 0.09, 0.13, 0.19, 0.28, 0.4)

# Share of the target rows that is opened before gaps are filled. The rest is for samples that fit
# no gap.
OPENED = 0.99

# Approximate rows per stretch. Stretches of consecutive samples are packed in parallel (SIMD); the
# last row of each stretch stays emptier than the others.
ROWS_PER_STRETCH = 64

# Minimum number of stretches for which packing in parallel is faster.
MIN_STRETCHES = 128

PROBED = 1 << 13
"""Number of samples from which the size of gaps is estimated."""


def random_starts(
    samples: Sizes,
    sizes: Sizes,
    counts: Indices,
    capacity: int,
    least: int,
    rng: np.random.Generator,
) -> Generator[Start]:
    """Yield packings of randomly ordered samples, the most random first.

    `sizes` are the lengths of `samples`, `counts[length]` the number of samples of each length, and
    `least` the lower bound on rows. A start usually has more rows than that (see `repack`); with
    few short samples there is none.
    """
    tokens = np.cumsum(counts * np.arange(capacity + 1))
    for share in SHARES:
        # Half of the samples up to `limit` tokens are held back; rows are dealt up to `level`.
        limit = int(np.searchsorted(tokens, 2 * share * int(tokens[-1])))
        level = _level(sizes[:PROBED], limit, capacity, int(tokens[-1]) / least)
        if level <= capacity:
            yield _fill(samples, sizes, limit, level, capacity, rng)


def repack(
    rows: Rows, target_rows: int, share: float, choices: Sequence[Choose] = EXACT_CHOICES
) -> None:
    """Repack the `share` of rows with the most free room by `search_best`, which tries `choices`;
    reduces the total to `target_rows`. Rows change in place, only if the plan needs fewer."""
    if rows.num_rows <= target_rows:
        return
    loosest = stable_argsort(rows.totals, rows.capacity)[: 20 + int(share * rows.num_rows)]
    samples = rows.samples_in(loosest)
    counts = count_values(rows.lengths[samples], rows.capacity)
    enough = len(loosest) - (rows.num_rows - target_rows)
    enough = max(enough, fewest_rows(counts, rows.capacity))
    plan = search_best(counts, rows.capacity, enough, choices)
    if plan.num_rows < len(loosest):
        rows.replace(loosest, build_rows(rows.lengths, samples, plan, rows.capacity))


def _hold_back(sizes: Sizes, limit: int) -> tuple[Indices, Indices]:
    """Indices of samples placed first, and of those held back: half of those up to `limit`."""
    is_small = sizes <= limit
    # Samples are in random order, so every second one is a random half.
    is_small[1::2] = False
    return np.flatnonzero(~is_small), np.flatnonzero(is_small)


def _level(sizes: Sizes, limit: int, capacity: int, tokens_per_row: float) -> int:
    """Fill level in tokens at which the samples that are not held back need the target number of
    rows. Above `capacity` if they do not fit."""
    dealt = sizes[_hold_back(sizes, limit)[0]]
    if not len(dealt):
        return capacity + 1
    tokens = int(dealt.sum(dtype=np.int64))
    gap = capacity - tokens / len(_deal(dealt, capacity))
    return round(tokens / (OPENED * int(sizes.sum(dtype=np.int64)) / tokens_per_row) + gap)


def _fill(
    samples: Sizes,
    sizes: Sizes,
    limit: int,
    level: int,
    capacity: int,
    rng: np.random.Generator,
) -> Start:
    """Fill rows to `level` by next fit, then fill their gaps with the samples held back."""
    dealt, back = _hold_back(sizes, limit)
    dealt_sizes, back_sizes = sizes[dealt], sizes[back]
    # Number of samples of each row.
    widths = _deal(dealt_sizes, level)
    totals = np.add.reduceat(dealt_sizes, row_starts(widths), dtype=np.int64)
    by_gap = stable_argsort(totals, capacity)[::-1]
    rows_by_gap = np.bincount(capacity - totals)
    gaps = np.flatnonzero(rows_by_gap)
    rooms = list(zip(gaps.tolist(), rows_by_gap[gaps].tolist(), strict=True))
    plan = best_fit(count_values(back_sizes, capacity), rooms, capacity)
    # A slot: samples of one length that a row gets.
    slots = plan_slots(plan)
    # The plan numbers existing rows by gap size, then the rows that it opens.
    opened = np.arange(len(widths), plan.num_rows)
    by_gap = np.concatenate([by_gap, opened])
    # Those have no sample yet.
    widths, totals = (np.append(dealt_to, np.zeros_like(opened)) for dealt_to in (widths, totals))
    added = np.empty_like(widths)
    added[by_gap] = slots.widths()
    totals[by_gap] += slots.totals()
    # Short samples fill gaps; put them first or last at random, so that they are not always last.
    ahead = rng.integers(2, size=plan.num_rows)
    starts = row_starts(widths + added)
    placed = np.empty_like(samples)
    placed[ranges(starts + ahead * added, widths)] = samples[dealt]
    positions = slots.places((starts + (1 - ahead) * widths)[by_gap])
    placed[positions] = samples[back[stable_argsort(back_sizes, capacity)]]
    return placed, widths + added, totals


def _deal(sizes: Sizes, level: int) -> Indices:
    """Number of samples of each row, by next fit in the order given.

    A row has at most `level` tokens, or one longer sample.
    """
    num_stretches = int(sizes.sum(dtype=np.int64)) // (ROWS_PER_STRETCH * level)
    if num_stretches < MIN_STRETCHES:
        ends = next_fit(sizes, level)
    else:
        ends = np.append(np.flatnonzero(_opens(sizes, level, num_stretches))[1:], len(sizes))
    return np.diff(ends, prepend=0)


def _opens(sizes: Sizes, level: int, num_stretches: int) -> npt.NDArray[np.bool_]:
    """Whether each sample is the first of its row."""
    # Stretches have equally many samples; each iteration places one sample of every stretch.
    steps = -(-len(sizes) // num_stretches)
    padded = np.zeros(num_stretches * steps, dtype=sizes.dtype)
    padded[: len(sizes)] = sizes
    dealt = np.ascontiguousarray(padded.reshape(num_stretches, steps).T)
    opens = np.empty(dealt.shape, dtype=np.bool_)
    room = np.zeros(num_stretches, dtype=sizes.dtype)
    for sample, first in zip(dealt, opens, strict=True):
        np.greater(sample, room, out=first)
        np.putmask(room, first, level)
        np.maximum(room, sample, out=room)
        room -= sample
    return opens.T.ravel()[: len(sizes)]
