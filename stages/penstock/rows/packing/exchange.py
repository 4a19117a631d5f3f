"""Mix samples between rows without adding rows.

Bin packing that fills rows well puts samples of similar length together, and a model trains worse
if all short samples come at once. So rows swap samples: each offers a random subset, rows whose
subsets have about equally many tokens are paired, and the subsets are swapped.
"""

import numpy as np

from penstock.rows.packing.rows import Rows, row_starts
from penstock.rows.packing.sorting import stable_argsort


def exchange(rows: Rows, rounds: int, rng: np.random.Generator) -> None:
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
