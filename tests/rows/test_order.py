from collections import Counter
from itertools import islice

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.sample_order import (
    DatasetMixer,
    draws_until,
    epoch_orders,
    quotas,
    samples_per_dataset,
)

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=5)
DRAWN = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 9)), min_size=1, max_size=5)
SEEDS = st.integers(0, 9)


def concat(sizes, seed, before=True, merged=True):
    mixing = DatasetMixer(
        seed,
        weights=(1.0,) * len(sizes),
        shuffle_before_merging_datasets=before,
        shuffle_merged_datasets=merged,
    )
    [epoch] = epoch_orders(sizes, mixing)
    return epoch.tolist()


def drawing(strategy, parts, seed=0, **more):
    """(sizes, mixing) for (size, weight) pairs."""
    sizes, weights = zip(*parts, strict=True)
    return list(sizes), DatasetMixer(seed, strategy, tuple(weights), **more)


def by_source(sizes, samples):
    """What each source gave, in order, as places in the source."""
    ends = np.cumsum(sizes)
    of = np.searchsorted(ends, samples, side="right")
    return [(samples[of == one] - (ends[one] - size)).tolist() for one, size in enumerate(sizes)]


@given(SIZES, SEEDS, st.booleans(), st.booleans())
def test_an_order_is_a_permutation_that_the_seed_decides(sizes, seed, each, merged):
    order = concat(sizes, seed, each, merged)
    assert sorted(order) == list(range(sum(sizes)))
    assert order == concat(sizes, seed, each, merged)


def test_shuffling_before_merging_keeps_data_sets_apart_and_leaves_a_single_one_alone():
    order = concat([50, 50], 1, True, False)
    assert sorted(order[:50]) == list(range(50))
    assert order[:50] != list(range(50))
    assert concat([100], 1, True, False) == list(range(100))


def test_shuffling_after_merging_mixes_data_sets_and_another_seed_mixes_otherwise():
    order = concat([50, 50], 1, False, True)
    assert 10 < sum(index < 50 for index in order[:50]) < 40
    assert order != concat([50, 50], 2, False, True)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 10_000))
def test_quotas_are_the_shares_rounded_so_that_they_sum_to_the_whole(weights, total):
    shares = np.array(weights) / sum(weights)
    found = quotas(shares, total)
    assert sum(found) == total
    assert all(abs(quota - share * total) < 1 for quota, share in zip(found, shares, strict=True))


@given(DRAWN, SEEDS, st.integers(1, 100), st.integers(1, 4), st.booleans())
def test_every_random_epoch_draws_each_source_by_its_share_from_where_the_last_one_stopped(
    parts, seed, total, epochs, merged
):
    sizes, mixing = drawing(
        "random",
        parts,
        seed,
        samples_per_epoch=total,
        epochs=epochs,
        shuffle_merged_datasets=merged,
    )
    found = [by_source(sizes, epoch) for epoch in epoch_orders(sizes, mixing)]
    assert [[len(its) for its in epoch] for epoch in found] == [
        samples_per_dataset(sizes, mixing)
    ] * epochs
    assert sum(samples_per_dataset(sizes, mixing)) == total
    for of, size in enumerate(sizes):
        counts = Counter(sample for epoch in found for sample in epoch[of])
        times = [counts[sample] for sample in range(size)]
        assert max(times) - min(times) <= 1  # no sample comes again before all others have come


def test_a_random_epoch_has_as_many_samples_as_there_are_unless_it_is_written():
    sizes, mixing = drawing("random", [(10, 1.0), (30, 1.0)])
    assert samples_per_dataset(sizes, mixing) == [20, 20]


def test_each_pass_over_a_drawn_source_is_shuffled_anew_or_never():
    parts = [(20, 3.0), (7, 1.0)]
    plain = {"samples_per_epoch": 80, "epochs": 2, "shuffle_merged_datasets": False}
    sizes, mixing = drawing("random", parts, **plain)
    first = by_source(sizes, epoch_orders(sizes, mixing)[0])[0]
    assert sorted(first[:20]) == sorted(first[20:40]) == list(range(20))
    assert len({tuple(first[:20]), tuple(first[20:40]), tuple(range(20))}) == 3
    sizes, mixing = drawing("random", parts, **plain, shuffle_before_merging_datasets=False)
    both = np.concatenate(epoch_orders(sizes, mixing))
    assert by_source(sizes, both) == [[n % 20 for n in range(120)], [n % 7 for n in range(40)]]


@pytest.mark.parametrize(
    ("ends", "until"), [("first", "first_exhausted"), ("last", "all_exhausted")]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_interleaving_draws_the_sources_that_datasets_would_draw(ends, until, seed):
    sizes, shares = [40, 25, 3000], np.array([0.3, 0.1, 0.6])
    parts = [datasets.Dataset.from_dict({"of": [of] * size}) for of, size in enumerate(sizes)]
    expected = datasets.interleave_datasets(parts, shares.tolist(), seed, stopping_strategy=until)
    found = draws_until(sizes, shares, ends, np.random.default_rng(seed))
    assert found.tolist() == expected["of"][:]


@given(DRAWN, SEEDS, st.booleans())
def test_interleaving_stops_at_the_first_or_at_the_last_source_that_runs_out(parts, seed, merged):
    for strategy in ("interleave_under", "interleave_over"):
        sizes, mixing = drawing(strategy, parts, seed, shuffle_merged_datasets=merged)
        [epoch] = epoch_orders(sizes, mixing)
        found = by_source(sizes, epoch)
        assert [len(its) for its in found] == samples_per_dataset(sizes, mixing)
        exhausted = [set(its) == set(range(size)) for its, size in zip(found, sizes, strict=True)]
        repeated = [len(set(its)) < len(its) for its in found]
        if strategy == "interleave_under":
            assert any(exhausted)
            assert not any(repeated)
        else:
            assert all(exhausted)
            assert not all(repeated)


def test_interleaved_sources_come_in_turns_as_often_as_their_weights_say():
    sizes, mixing = drawing(
        "interleave_under", [(5000, 3.0), (5000, 1.0)], shuffle_merged_datasets=False
    )
    of = np.concatenate(epoch_orders(sizes, mixing)) >= 5000
    assert all(0.15 < part.mean() < 0.35 for part in islice(np.array_split(of, 6), 6))


def test_a_source_without_weight_is_never_drawn():
    for strategy in ("random", "interleave_under", "interleave_over"):
        sizes, mixing = drawing(strategy, [(9, 1.0), (0, 0.0), (9, 2.0), (4, 0.0)])
        assert [count > 0 for count in samples_per_dataset(sizes, mixing)] == [
            True,
            False,
            True,
            False,
        ]


def test_the_orders_of_reference_runs_do_not_move():
    # Existing artifacts were made in this order; a change here must raise the stages' versions.
    assert concat([4, 3], 42) == GOLDEN_ORDER
    for strategy, golden in GOLDEN_MIXED.items():
        sizes, mixing = drawing(strategy, [(4, 1.0), (3, 2.0)], 42, epochs=2)
        assert [epoch.tolist() for epoch in epoch_orders(sizes, mixing)][-1] == golden


GOLDEN_ORDER = [6, 0, 4, 5, 1, 3, 2]
GOLDEN_MIXED = {
    "random": [6, 2, 6, 5, 0, 4, 5],
    "interleave_under": [5, 6, 1, 4],
    "interleave_over": [0, 6, 5, 3, 2, 6, 1, 4],
}
