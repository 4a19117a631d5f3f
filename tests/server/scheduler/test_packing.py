"""Rows of samples: every sample in one, none too long, and as few or as even as they are to be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.pack_rows import check_lengths, pack
from penstock.server.scheduler.settings import SchedulerSettings

CAPACITY = 64
STRATEGIES = ["sequential", "best_fit", "balanced_dp"]


def said(tmp_path, strategy, **given):
    return SchedulerSettings(
        output_dir=tmp_path,
        sample_packing_sequence_len=CAPACITY,
        sample_packing_strategy=strategy,
        **given,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60), replicas=st.integers(1, 5)
)
@settings(max_examples=60, deadline=None)
def test_every_sample_is_in_one_row_and_none_is_too_long(
    tmp_path_factory, strategy, lengths, replicas
):
    rows = pack(lengths, said(tmp_path_factory.getbasetemp(), strategy), replicas)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in row) <= CAPACITY for row in rows)


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_best_fit_needs_no_more_rows_than_their_order_does(tmp_path_factory, lengths):
    root = tmp_path_factory.getbasetemp()
    rows = pack(lengths, said(root, "best_fit"), 1)
    assert len(rows) <= len(pack(lengths, said(root, "sequential"), 1))


def test_their_order_is_kept_where_that_is_wanted(tmp_path):
    rows = pack([40, 20, 10, 64, 1, 1], said(tmp_path, "sequential"), 2)
    assert rows == ((0, 1), (2,), (3,), (4, 5))


def test_few_rows_are_made_where_that_is_wanted(tmp_path):
    assert len(pack([40, 40, 24, 24], said(tmp_path, "sequential"), 1)) == 3
    assert pack([40, 40, 24, 24], said(tmp_path, "best_fit"), 1) in (
        ((0, 2), (1, 3)),
        ((0, 3), (1, 2)),
    )


@given(
    lengths=st.lists(st.integers(1, CAPACITY // 4), min_size=8, max_size=60),
    replicas=st.integers(2, 4),
)
@settings(max_examples=50, deadline=None)
def test_replicas_get_as_many_rows_and_about_as_many_tokens(tmp_path_factory, lengths, replicas):
    root = tmp_path_factory.getbasetemp()
    rows = pack(lengths, said(root, "balanced_dp"), replicas)
    assert len(rows) % replicas == 0 or len(rows) == len(lengths)
    totals = sorted(sum(lengths[sample] for sample in row) for row in rows)
    # The longest of these first, to the emptiest row: no two differ by more than one sample.
    assert totals[-1] - totals[0] <= max(lengths)


def test_without_packing_each_sample_has_a_row(tmp_path):
    assert pack([3, 1, 2], said(tmp_path, "best_fit", enable_packing=False), 2) == (
        (0,),
        (1,),
        (2,),
    )


def test_a_sample_that_no_row_holds_is_named():
    check_lengths([CAPACITY, 1], CAPACITY)
    with pytest.raises(RequestError, match="sample 1 has 65 tokens, and a row holds 64") as caught:
        check_lengths([1, CAPACITY + 1], CAPACITY)
    assert "sample_packing_sequence_len" in str(caught.value)
    assert (caught.value.category, caught.value.code) == ("user", "invalid")
