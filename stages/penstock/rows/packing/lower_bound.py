"""How few rows could do."""

import numpy as np

from penstock.rows.bin_plan import Indices


def fewest_rows(counts: Indices, capacity: int) -> int:
    """A lower bound on the rows that samples need, `counts[length]` of each length to `capacity`.

    Martello and Toth's L2 (Knapsack Problems, 1990, section 8.3.2): for any limit, samples that
    leave less room than it are alone, those above half of the rest have a row each, and what those
    do not hold of the samples down to the limit needs more rows. It is never below the sum of all
    lengths over `capacity`, which is the case of limit 0.
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
    rest = tokens[half + 1] - tokens[limit] - room
    return int((num_alone + num_large + np.maximum(0, -(-rest // capacity))).max())
