"""Mixing which samples share a row, without changing how many rows there are.

Every plan that fills rows well also puts samples of like lengths together, and a model that meets
all short samples at once learns from them badly. So rows trade: each offers a random part of its
samples, rows whose parts hold equally many tokens are paired, and the parts change places.
"""

import numpy as np

from penstock.rows.packing.rows import Rows
from penstock.rows.packing.sorting import order_of


def exchange(rows: Rows, rounds: int, rng: np.random.Generator) -> None:
    """Let pairs of rows trade parts, `rounds` times over.

    A part is each sample with a chance that differs from row to row, so that parts of all sizes
    are offered. Parts may differ by as much as the emptier row has room for.
    """
    if not rounds:
        return
    row = np.repeat(np.arange(rows.num_rows), rows.widths)
    totals = rows.totals()
    for _ in range(rounds):
        chance = np.frombuffer(rng.bytes(rows.num_rows), dtype=np.uint8)
        coins = np.frombuffer(rng.bytes(len(row)), dtype=np.uint8)
        offered = coins < chance[row]
        parts = np.bincount(row, rows.sizes * offered, rows.num_rows).astype(np.int64)
        shuffled = rng.permutation(rows.num_rows)
        by_part = shuffled[order_of(parts[shuffled], rows.capacity)]
        # Neighbours in this order trade; which ones are neighbours alternates.
        start = int(rng.integers(2))
        pairs = by_part[start : start + (rows.num_rows - start) // 2 * 2].reshape(-1, 2)
        gains = parts[pairs[:, 1]] - parts[pairs[:, 0]]
        fit = totals[pairs[:, 0]] + gains <= rows.capacity
        ones, others = pairs[fit].T
        totals[ones] += gains[fit]
        totals[others] -= gains[fit]
        partner = np.arange(rows.num_rows)
        partner[ones], partner[others] = others, ones
        row = np.where(offered, partner[row], row)
    widths = np.bincount(row, minlength=rows.num_rows)
    # A row that gave all it had for nothing is no more.
    rows.take(order_of(row, rows.num_rows), widths[widths > 0])
