import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.order import Ordering, global_order, row_order, validation_rows

SIZES = st.lists(st.integers(0, 40), max_size=5)


@given(SIZES, st.integers(0, 9), st.booleans(), st.booleans())
def test_an_order_is_a_permutation_that_the_seed_decides(sizes, seed, each, merged):
    order = global_order(sizes, Ordering(seed, each, merged))
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    assert order.tolist() == global_order(sizes, Ordering(seed, each, merged)).tolist()


def test_shuffling_before_merging_keeps_data_sets_apart_and_leaves_a_single_one_alone():
    order = global_order([50, 50], Ordering(1, True, False)).tolist()
    assert sorted(order[:50]) == list(range(50))
    assert order[:50] != list(range(50))
    assert global_order([100], Ordering(1, True, False)).tolist() == list(range(100))


def test_shuffling_after_merging_mixes_data_sets_and_another_seed_mixes_otherwise():
    order = global_order([50, 50], Ordering(1, False, True)).tolist()
    assert 10 < sum(index < 50 for index in order[:50]) < 40
    assert order != global_order([50, 50], Ordering(2, False, True)).tolist()


@given(st.integers(1, 500), st.floats(0.001, 0.9), st.integers(0, 5))
def test_a_share_for_validation_is_rounded_and_at_least_one(rows, share, seed):
    chosen = validation_rows(rows, share, seed)
    assert len(chosen) == max(1, round(share * rows))
    assert len(set(chosen.tolist())) == len(chosen)
    assert (np.diff(chosen) > 0).all()
    assert chosen.max() < rows


def test_a_whole_number_for_validation_is_a_number_of_samples():
    assert len(validation_rows(100, 1, 0)) == 1
    assert len(validation_rows(100, None, 0)) == 0
    assert validation_rows(100, 10, 0).tolist() != validation_rows(100, 10, 1).tolist()


def test_the_orders_of_reference_runs_do_not_move():
    # Existing artifacts were made in this order; a change here must raise the stages' versions.
    assert global_order([4, 3], Ordering(42, True, True)).tolist() == GOLDEN_ORDER
    assert validation_rows(20, 4, 42).tolist() == GOLDEN_VALIDATION
    assert row_order(6, 42).tolist() == GOLDEN_ROWS


GOLDEN_ORDER = [6, 0, 4, 5, 1, 3, 2]
GOLDEN_VALIDATION = [3, 11, 15, 17]
GOLDEN_ROWS = [1, 3, 4, 5, 0, 2]
