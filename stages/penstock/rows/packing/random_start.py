"""Rows that are random to begin with: most samples as they come, short ones in the gaps.

A random sequence of samples, cut into rows, leaves a gap at the end of each. A random part of the
short samples is kept back and fills the gaps.
"""

from collections.abc import Callable, Generator

import numpy as np

from penstock.rows.bin_plan import Indices, Sizes
from penstock.rows.packing.deal import deal
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.packing.patterns import Patterns, best_fit
from penstock.rows.packing.rows import Rows, plan_slots, planned, row_starts
from penstock.rows.packing.sorting import count_values, ranges, stable_argsort

Start = tuple[Sizes, Indices, Indices]
"""The samples row after row; how many of them each row has, and how many tokens."""

SHARES = (0.04, 0.06, 0.09, 0.13, 0.19, 0.28, 0.4)
"""Shares of all tokens to keep back, tried from the smallest: the fewer, the more random."""

OPENED = 0.99
"""The share of the rows that are to be opened before the gaps are filled. Some are left over, for
samples that fit no gap."""

PROBED = 1 << 13
"""Samples that tell how large the gaps of all will be."""


def random_starts(
    samples: Sizes,
    sizes: Sizes,
    counts: Indices,
    capacity: int,
    least: int,
    rng: np.random.Generator,
) -> Generator[Start]:
    """Rows of samples that come in random order, the most random first.

    `sizes` are the lengths of the samples, `counts[length]` says how many there are of each length,
    and `least` how few rows they might need. A start has more, as a rule (see `repack`); there is
    none where few samples are short.
    """
    tokens = np.cumsum(counts * np.arange(capacity + 1))
    for share in SHARES:
        limit = int(np.searchsorted(tokens, 2 * share * int(tokens[-1])))
        level = _level(sizes[:PROBED], limit, capacity, int(tokens[-1]) / least)
        if level <= capacity:
            yield _filled(samples, sizes, limit, level, capacity, rng)


def repack(
    rows: Rows, wanted: int, share: float, pack: Callable[[Indices, int, int], Patterns]
) -> None:
    """Bring together the room that is left in many rows, so that some can be done without.

    Of the rows, the `share` with most room is packed again, for `wanted` rows in all if `pack` can.
    It makes rows from counts, capacity and the number of rows that is enough.
    """
    if rows.num_rows <= wanted:
        return
    loosest = stable_argsort(rows.totals, rows.capacity)[: 20 + int(share * rows.num_rows)]
    samples = rows.held(loosest)
    counts = count_values(rows.lengths[samples], rows.capacity)
    enough = len(loosest) - (rows.num_rows - wanted)
    plan = pack(counts, rows.capacity, max(enough, fewest_rows(counts, rows.capacity)))
    if plan.num_rows < len(loosest):
        rows.replace(loosest, planned(rows.lengths, samples, plan, rows.capacity))


def _kept(sizes: Sizes, limit: int) -> tuple[Indices, Indices]:
    """Which samples are dealt, and which are kept back: half of those to the limit.

    They are in random order, so that every second one is a random half.
    """
    kept = sizes <= limit
    kept[1::2] = False
    return np.flatnonzero(~kept), np.flatnonzero(kept)


def _level(sizes: Sizes, limit: int, capacity: int, tokens_per_row: float) -> int:
    """How far to fill rows with what is not kept back, for all of it to need the rows there are to
    be. Above `capacity` where it does not fit."""
    dealt = sizes[_kept(sizes, limit)[0]]
    if not len(dealt):
        return capacity + 1
    tokens = int(dealt.sum(dtype=np.int64))
    gap = capacity - tokens / len(deal(dealt, capacity))
    return round(tokens / (OPENED * int(sizes.sum(dtype=np.int64)) / tokens_per_row) + gap)


def _filled(
    samples: Sizes,
    sizes: Sizes,
    limit: int,
    level: int,
    capacity: int,
    rng: np.random.Generator,
) -> Start:
    """Rows dealt to the level, their gaps filled with what was kept back."""
    dealt, back = _kept(sizes, limit)
    dealt_sizes, back_sizes = sizes[dealt], sizes[back]
    widths = deal(dealt_sizes, level)
    totals = np.add.reduceat(dealt_sizes, row_starts(widths), dtype=np.int64)
    by_gap = stable_argsort(totals, capacity)[::-1]
    rows = np.bincount(capacity - totals)
    gaps = np.flatnonzero(rows)
    rooms = list(zip(gaps.tolist(), rows[gaps].tolist(), strict=True))
    plan = best_fit(count_values(back_sizes, capacity), rooms, capacity)
    slots = plan_slots(plan)
    # The plan numbers rows by their gap, and those it opens behind them.
    opened = np.arange(len(widths), plan.num_rows)
    by_gap = np.concatenate([by_gap, opened])
    widths, totals = (np.append(dealt_to, 0 * opened) for dealt_to in (widths, totals))
    added = np.empty_like(widths)
    added[by_gap] = slots.widths()
    totals[by_gap] += slots.totals()
    # What fills a gap is short; a coin says whether it stands before the others or behind them.
    ahead = rng.integers(2, size=plan.num_rows)
    starts = row_starts(widths + added)
    placed = np.empty_like(samples)
    placed[ranges(starts + ahead * added, widths)] = samples[dealt]
    places = slots.places((starts + (1 - ahead) * widths)[by_gap])
    placed[places] = samples[back[stable_argsort(back_sizes, capacity)]]
    return placed, widths + added, totals
