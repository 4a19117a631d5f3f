"""Mixing which samples share a row, without changing how many rows there are.

Every plan that fills rows well also puts samples of like lengths together, and a model that meets
all short samples at once learns from them badly. So rows trade: each offers a random part of its
samples, rows whose parts hold equally many tokens are paired, and the parts change places.
"""

import numpy as np

from penstock.rows.packing.rows import Rows, row_starts
from penstock.rows.packing.sorting import stable_argsort


def exchange(rows: Rows, rounds: int, rng: np.random.Generator) -> None:
    """Let pairs of rows trade parts, `rounds` times over.

    A part is each sample with a chance that differs from row to row, so that parts of all sizes
    are offered. Parts may differ by as much as the emptier row has room for.
    """
    if not rounds:
        return
    num_rows, totals = rows.num_rows, rows.totals
    row = np.repeat(np.arange(num_rows), rows.widths)
    rows.samples = rows.held(np.arange(num_rows))
    sizes = rows.lengths[rows.samples]
    for _ in range(rounds):
        chance = np.frombuffer(rng.bytes(num_rows), dtype=np.uint8)
        coins = np.frombuffer(rng.bytes(len(row)), dtype=np.uint8)
        offered = coins < chance[row]
        parts = np.bincount(row, sizes * offered, num_rows).astype(np.int64)
        shuffled = rng.permutation(num_rows)
        by_part = shuffled[stable_argsort(parts[shuffled], rows.capacity)]
        # Neighbours in this order trade; which ones are neighbours alternates.
        start = int(rng.integers(2))
        pairs = by_part[start : start + (num_rows - start) // 2 * 2].reshape(-1, 2)
        gains = parts[pairs[:, 1]] - parts[pairs[:, 0]]
        fit = np.flatnonzero(totals[pairs[:, 0]] + gains <= rows.capacity)
        ones, others = pairs[fit].T
        totals[ones] += gains[fit]
        totals[others] -= gains[fit]
        # Where each row's samples go: first those of rows that keep them, then those offered.
        target = np.tile(np.arange(num_rows), 2)
        target[num_rows + ones], target[num_rows + others] = others, ones
        row = target[row + num_rows * offered]
    widths = np.bincount(row, minlength=num_rows)
    # A row that gave all it had for nothing is no more.
    left = np.flatnonzero(widths)
    rows.samples = rows.samples[stable_argsort(row, num_rows)]
    rows.widths, rows.totals = widths[left], totals[left]
    rows.starts = row_starts(rows.widths)
