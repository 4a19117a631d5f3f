"""Sample packing: samples of a pass into rows of bounded length.

`sequential` keeps the order; `best_fit` minimizes the number of rows; `balanced_dp` makes an equal
number of rows per replica, of about equal length.
"""

import heapq
from collections.abc import Iterable

import numpy as np

from penstock.rows.bin_plan import Indices, one_per_row, sequential
from penstock.rows.packing.exact import search_best
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.packing.rows import build_rows
from penstock.rows.packing.sorting import count_values
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.settings import SchedulerSettings

Rows = tuple[tuple[int, ...], ...]


def pack(lengths: list[int], settings: SchedulerSettings, replicas: int) -> Rows:
    """The sample indices of each row. All lengths must fit (see `check_lengths`)."""
    capacity, sizes = settings.sample_packing_sequence_len, np.array(lengths, np.int64)
    if not settings.enable_packing:
        rows = one_per_row(len(lengths)).tolist()
    elif settings.sample_packing_strategy == "sequential":
        rows = sequential(sizes, capacity).tolist()
    elif settings.sample_packing_strategy == "best_fit":
        counts = count_values(sizes, capacity)
        plan = search_best(counts, capacity, fewest_rows(counts, capacity))
        built = build_rows(sizes, np.arange(len(sizes)), plan, capacity)
        numbers = range(built.num_rows)
        rows = sorted(sorted(built.samples_in(np.array([row])).tolist()) for row in numbers)
    else:
        rows = _balanced(sizes, capacity, replicas)
    return tuple(map(tuple, rows))


def check_lengths(lengths: Iterable[int], capacity: int) -> None:
    """Raises RequestError for a sample longer than a row."""
    for index, length in enumerate(lengths):
        if length > capacity:
            raise RequestError(
                "invalid",
                f"sample {index} has {length} tokens, and a row holds {capacity}"
                " (sample_packing_sequence_len).\n"
                "  Send it in parts, or raise the field in the server's file.",
            )


def _balanced(lengths: Indices, capacity: int, replicas: int) -> list[list[int]]:
    """Longest sample first, into the emptiest row (LPT, Graham 1969); adds rows, as many for every
    replica, until all samples fit."""
    fewest = fewest_rows(count_values(lengths, capacity), capacity)
    order = np.argsort(-lengths, kind="stable").tolist()
    num_rows = -(-fewest // replicas) * replicas
    while True:
        rows: list[list[int]] = [[] for _ in range(num_rows)]
        # If the emptiest row has no room, no other row has.
        held = [(0, row) for row in range(num_rows)]
        for sample in order:
            total, row = held[0]
            if total + int(lengths[sample]) > capacity:
                break
            rows[row].append(sample)
            heapq.heapreplace(held, (total + int(lengths[sample]), row))
        else:
            # Rows are dealt to replicas round robin: rows of similar length run at the same time.
            filled = [sorted(row) for row in rows if row]
            return sorted(filled, key=lambda row: -int(lengths[row].sum()))
        num_rows += replicas
