from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.bin_plan import join, one_per_row, sequential

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


@given(LENGTHS, st.integers(20, 120))
def test_sequential_keeps_the_order_and_overflows_only_with_a_sample_too_long(lengths, capacity):
    rows = sequential(lengths, capacity).tolist()
    assert [i for row in rows for i in row] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity or len(row) == 1 for row in rows)
    for row, following in pairwise(rows):
        assert sum(lengths[i] for i in row) + lengths[following[0]] > capacity


@given(st.lists(st.integers(0, 5), max_size=5))
def test_rows_that_are_joined_stay_as_they_were(sizes):
    parts = [one_per_row(size) for size in sizes]
    assert join(parts).tolist() == [row for part in parts for row in part.tolist()]
    assert join(parts).sizes().tolist() == [1] * sum(sizes)
