import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.bins import alone, multipack, sequential

LENGTHS = st.lists(st.integers(1, 50), max_size=200)


# What the reference training system gives for capacity 10.
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([4, 5, 6, 5], [[0, 1], [2], [3]]),
        ([3, 7, 3, 7, 5, 5], [[0, 1], [2, 3], [4, 5]]),
        ([6, 6, 4, 4, 4, 6], [[0], [1, 2], [3, 4], [5]]),
        ([2, 5, 4, 7, 1, 3, 8], [[0, 1], [2], [3, 4], [5], [6]]),
        ([12, 3], [[0], [1]]),
        ([], []),
    ],
)
def test_sequential_is_next_fit(lengths, rows):
    assert sequential(lengths, 10).tolist() == rows


@given(LENGTHS, st.integers(50, 120))
def test_sequential_keeps_the_order_and_never_overflows(lengths, capacity):
    rows = sequential(lengths, capacity).tolist()
    assert [i for row in rows for i in row] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    for row, following in pairwise(rows):
        assert sum(lengths[i] for i in row) + lengths[following[0]] > capacity


def best_fit_decreasing(lengths, capacity):
    """How many rows the textbook algorithm needs, one sample at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return len(rooms)


@given(LENGTHS, st.integers(50, 120))
def test_multipack_loses_nothing_and_needs_as_many_rows_as_best_fit_decreasing(lengths, capacity):
    rows = multipack(lengths, capacity, 1000).tolist()
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert len(rows) == best_fit_decreasing(lengths, capacity)


@given(LENGTHS, st.integers(1, 40))
def test_groups_share_no_row(lengths, group_size):
    for row in multipack(lengths, 64, group_size).tolist():
        assert len({i // group_size for i in row}) == 1


@given(LENGTHS, st.randoms(use_true_random=False))
def test_reordering_rows_changes_no_row(lengths, random):
    bins = multipack(lengths, 64, 1000)
    order = list(range(len(bins)))
    random.shuffle(order)
    moved = bins.reordered(np.array(order, dtype=np.int64))
    assert moved.tolist() == [bins.tolist()[i] for i in order]


def test_a_million_lengths_are_packed_tightly_within_seconds():
    lengths = np.random.default_rng(0).lognormal(6.2, 0.9, 1_000_000).astype(np.int64)
    lengths = np.clip(lengths, 1, 4096)
    started = time.process_time()
    bins = multipack(lengths, 4096, 1_000_000)
    assert time.process_time() - started < 3  # half a second on an idle core
    assert len(bins) <= 1.0005 * lengths.sum() / 4096


def test_a_sample_longer_than_a_row_is_refused_by_multipack():
    with pytest.raises(ValueError, match="12"):
        multipack([12, 3], 10, 100)
    assert alone(2).tolist() == [[0], [1]]
