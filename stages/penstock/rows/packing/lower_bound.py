"""Lower bound on the number of rows (bin packing)."""

import numpy as np

from penstock.rows.bin_plan import Indices


def fewest_rows(counts: Indices, capacity: int) -> int:
    """Lower bound on the rows for `counts[length]` samples of each length up to `capacity`.

    Martello and Toth's L2 (Knapsack Problems, 1990, section 8.3.2), the maximum over all limits:
    samples longer than `capacity` minus the limit are alone in their rows; other samples longer
    than half of `capacity` have one row each; the remaining samples down to the limit fill the room
    in those rows and need further rows for the rest. With limit 0 this is at least the sum of all
    lengths over `capacity`.
    """
    lengths = np.arange(capacity + 1)
    below = np.concatenate([[0], np.cumsum(counts)])  # samples shorter than an index
    tokens = np.concatenate([[0], np.cumsum(counts * lengths)])  # and their tokens
    half = capacity // 2
    limit = np.arange(half + 1)
    split = capacity - limit + 1
    num_alone = below[capacity + 1] - below[split]
    num_large = below[split] - below[half + 1]
    room = num_large * capacity - (tokens[split] - tokens[half + 1])
    overflow = tokens[half + 1] - tokens[limit] - room
    return int((num_alone + num_large + np.maximum(0, -(-overflow // capacity))).max())
