from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.batches import StepSampler, assign_micro_batches, epoch_order


@st.composite
def runs(draw, *last_batch):
    """Rows of random cost in one to three laid-out epochs, enough for windows or not."""
    epochs = draw(st.lists(st.integers(1, 120), min_size=1, max_size=3))
    costs = np.array(draw(st.lists(st.integers(1, 9), min_size=1, max_size=9)))
    return StepSampler(
        np.resize(costs, sum(epochs)) ** 3,
        rows_per_step=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 3)),
        last_batch=draw(st.sampled_from(last_batch)),
        epoch_rows=epochs,
    )


ANY, KEPT = runs("drop", "drop_few", "keep"), runs("keep")


def walk(batches, cursor, num_steps):
    """(cursor, rows) of steps, each drawn anew as a run that resumes there would."""
    for _ in range(num_steps):
        rows = batches.rows(cursor).tolist()
        again = StepSampler(
            batches.costs,
            rows_per_step=batches.rows_per_step,
            seed=batches.seed,
            last_batch=batches._last_batch,
            epoch_rows=batches._blocks,
        )
        assert again.rows(cursor).tolist() == rows
        yield cursor, rows
        cursor = batches.advance(cursor)


def block_of(batches, epoch):
    """The stored rows of an epoch."""
    at = epoch % len(batches._blocks)
    start = sum(batches._blocks[:at])
    return list(range(start, start + batches._blocks[at]))


@given(ANY, st.integers(1, 5), st.integers(1, 3), st.integers(0, 4))
def test_every_row_is_computed_once_an_epoch_whatever_the_ranks_and_passes(
    batches, num_replicas, size, epoch
):
    start = batches.start(epoch)
    count = -(-batches.rows_per_step // (num_replicas * size))
    seen = []
    for cursor, rows in walk(batches, start, batches.steps_until(epoch + 1, start)):
        assert cursor.epoch == epoch
        dealt = assign_micro_batches(
            rows,
            batches.costs[rows].tolist(),
            num_replicas=num_replicas,
            size=size,
            count=count,
        )
        assert [len(mine) for mine in dealt] == [count] * num_replicas
        groups = [group for mine in dealt for group in mine]
        assert max(map(len, groups)) <= size
        assert sorted(row for group in groups for row in group) == sorted(rows)
        seen += rows
    expected, block = batches.rows_per_step, block_of(batches, epoch)
    assert len(set(seen)) == len(seen)
    rest, last = len(block) % expected, batches._last_batch
    if last == "keep" or len(block) < expected or (last == "drop_few" and 20 * rest > len(block)):
        assert sorted(seen) == block
    else:
        assert set(seen) <= set(block)
        assert len(seen) == len(block) - len(block) % expected


@given(KEPT, st.integers(0, 40), st.integers(1, 12), st.integers(0, 3))
def test_a_run_that_goes_on_with_other_batches_loses_and_repeats_no_row(batches, at, other, seed):
    steps = list(walk(batches, batches.start(), at + 1))
    cursor = steps[-1][0]
    before = [row for one, rows in steps[:-1] if one.epoch == cursor.epoch for row in rows]
    more = StepSampler(
        batches.costs,
        rows_per_step=other,
        seed=seed,
        last_batch="keep",
        epoch_rows=batches._blocks,
    )
    assert more.clamp(cursor) == cursor
    end = cursor.epoch + 2
    after = list(walk(more, cursor, more.steps_until(end, cursor)))
    rest = [row for one, rows in after if one.epoch == cursor.epoch for row in rows]
    assert sorted(before + rest) == block_of(batches, cursor.epoch)
    # The epoch keeps its order to its end; the next one is the new run's own.
    left = walk(batches, cursor, batches.steps_until(cursor.epoch + 1, cursor))
    assert rest == [row for _, rows in left for row in rows]
    own = [one for one, _ in after if one.epoch == end - 1]
    assert own[0] == more.start(end - 1)
    assert sorted(row for one, rows in after if one in own for row in rows) == block_of(
        more, end - 1
    )


@given(ANY, st.integers(0, 30), st.integers(0, 8))
def test_the_steps_to_an_epoch_are_those_that_are_taken(batches, at, epoch):
    cursor = batches.start()
    for _ in range(at):
        cursor = batches.advance(cursor)
    counted, progress = batches.steps_until(epoch, cursor), [batches.progress(cursor)]
    taken = 0
    while cursor.epoch < epoch:
        cursor = batches.advance(cursor)
        progress.append(batches.progress(cursor))
        assert (progress[-1].denominator == 1) == (cursor.samples == 0)
        taken += 1
    assert taken == counted
    assert all(one < other for one, other in pairwise(progress))


@given(ANY, st.integers(0, 30), st.fractions(0, 5, max_denominator=20))
def test_a_share_of_an_epoch_is_over_with_the_first_step_that_reaches_it(batches, at, epochs):
    cursor = batches.start()
    for _ in range(at):
        cursor = batches.advance(cursor)
    counted, taken = batches.steps_until(epochs, cursor), 0
    while batches.progress(cursor) < epochs:
        cursor = batches.advance(cursor)
        taken += 1
    assert taken == counted


@given(ANY, st.integers(0, 20), st.integers(-5, 30_000), st.none() | st.integers(0, 40))
def test_an_amount_is_reached_with_the_first_step_whose_rows_make_it_up(batches, at, amount, most):
    cursor = batches.start()
    for _ in range(at):
        cursor = batches.advance(cursor)
    amounts = 1 + batches.costs % 50
    counted = batches.steps_to_reach(amount, amounts, cursor, most=most)
    taken, total = 0, 0
    while total < amount and taken != most:
        total += int(amounts[batches.rows(cursor)].sum())
        cursor = batches.advance(cursor)
        taken += 1
    assert taken == counted


def test_rows_that_are_not_there_are_no_epoch():
    for epochs in ([3], [5], [4, 0]):
        with pytest.raises(ValueError, match="4 rows in epochs of"):
            StepSampler(np.arange(4), rows_per_step=1, seed=0, last_batch="drop", epoch_rows=epochs)
    with pytest.raises(ValueError, match="5 rows do not fit"):
        assign_micro_batches([0, 1, 2, 3, 4], [1] * 5, num_replicas=2, size=1, count=2)


def packed_costs(num_rows, seed=0):
    """Costs of full rows of 32k tokens with documents of heavy-tailed lengths."""
    rng = np.random.default_rng(seed)
    longest = np.minimum((rng.pareto(1.1, num_rows) + 1) * 2000, 32_768)
    return (51_313 * 32_768 + longest**2 + (32_768 - longest) * 1500).astype(np.int64)


def imbalance(steps, costs, num_replicas, size=1, count=1):
    """Mean over steps of the time all replicas take over the time of even ones."""
    found = []
    for rows in steps:
        dealt = assign_micro_batches(
            rows.tolist(), costs[rows].tolist(), num_replicas=num_replicas, size=size, count=count
        )
        work = np.array([[costs[group].sum() for group in mine] for mine in dealt])
        found.append(work.max(axis=0).sum() / work.mean(axis=0).sum())
    return np.mean(found)


@pytest.mark.parametrize(
    ("num_replicas", "size", "count", "bound"), [(8, 1, 1, 1.01), (64, 1, 1, 1.02), (8, 2, 4, 1.01)]
)
def test_replicas_that_share_a_step_have_the_same_work(num_replicas, size, count, bound):
    costs = packed_costs(20_000)
    at_once = num_replicas * size * count
    order = epoch_order(costs, at_once, [1, 0])
    steps = order[: len(order) // at_once * at_once].reshape(-1, at_once)
    plain = np.random.default_rng(0).permutation(len(costs))[: steps.size].reshape(steps.shape)
    assert imbalance(steps, costs, num_replicas, size, count) < bound
    # The same dealing of rows that nobody brought together.
    if size == 1:
        assert imbalance(plain, costs, num_replicas) > 1.05


def test_work_is_even_over_micro_batches_of_a_large_step_and_rows_fill_the_first_ones():
    costs = list(range(100, 112))
    dealt = assign_micro_batches(list(range(12)), costs, num_replicas=2, size=2, count=4)
    assert [[len(group) for group in mine] for mine in dealt] == [[2, 2, 2, 0]] * 2
    sums = [[sum(costs[row] for row in group) for group in mine] for mine in dealt]
    assert sums[0] == sums[1]


def test_steps_come_in_no_order_of_cost_and_of_other_rows_every_epoch():
    costs, group = packed_costs(8_000), 8
    epochs = [epoch_order(costs, group, [5, epoch]).reshape(-1, group) for epoch in (0, 1)]
    for steps in epochs:
        means = costs[steps].mean(axis=1)
        assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.1
        assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.1
        within = costs[steps] - means[:, None]
        assert abs(np.corrcoef(np.tile(np.arange(group), len(steps)), within.ravel())[0, 1]) < 0.1
    step_of = np.empty((2, len(costs)), dtype=np.int64)
    for epoch, steps in enumerate(epochs):
        step_of[epoch, steps] = np.arange(len(steps))[:, None]
    pairs = epochs[0][:, [0, 1]]
    met_again = step_of[1, pairs[:, 0]] == step_of[1, pairs[:, 1]]
    assert met_again.mean() < 0.1  # all of them, were the whole epoch sorted


def test_rows_that_fill_no_step_are_random_ones_not_the_dearest():
    costs = packed_costs(1_030)
    left = [epoch_order(costs, 64, [3, epoch])[-6:] for epoch in range(200)]
    assert costs[np.concatenate(left)].mean() == pytest.approx(costs.mean(), rel=0.03)
    assert len(np.unique(np.concatenate(left))) > 500


def test_where_bringing_together_gains_nothing_the_order_is_plainly_random():
    plain = np.random.Generator(np.random.PCG64([7, 2])).permutation(600).tolist()
    costs = packed_costs(600)
    assert epoch_order(costs, 1, [7, 2]).tolist() == plain
    assert epoch_order(costs, 100, [7, 2]).tolist() == plain  # six steps
    assert epoch_order(1000 + np.arange(600) % 10, 8, [7, 2]).tolist() == plain
    assert epoch_order(costs, 8, [7, 2]).tolist() != plain


def test_steps_of_more_rows_than_a_group_are_made_of_whole_groups():
    def group(rows_per_step):
        costs = np.ones(1, dtype=np.int64)
        return StepSampler(costs, rows_per_step=rows_per_step, seed=0, last_batch="keep").group

    sizes = {1: 1, 7: 1, 8: 8, 9: 9, 256: 256, 257: 1, 512: 256, 600: 200, 1000: 250}
    assert {rows: group(rows) for rows in sizes} == sizes


def test_the_order_of_reference_runs_does_not_move():
    # Checkpoints hold positions in this order; a change here must raise the stage's version.
    costs = np.arange(1, 97, dtype=np.int64) ** 2
    for rows_per_step, golden in GOLDEN_STEPS.items():
        batches = StepSampler(costs, rows_per_step=rows_per_step, seed=42, last_batch="drop")
        assert [rows for _, rows in walk(batches, batches.start(), len(golden))] == golden
        second = replace(batches.start(), samples=rows_per_step)
        assert batches.advance(second) == replace(second, samples=2 * rows_per_step)


GOLDEN_STEPS = {
    2: [[57, 21], [75, 18], [33, 40], [93, 27], [51, 39]],
    8: [[10, 3, 1, 0, 26, 17, 7, 5], [52, 29, 38, 61, 46, 63, 42, 68]],
}


def test_passes_count_rows_that_were_trained_and_not_those_that_were_left_out():
    batches = StepSampler(np.ones(7, np.int64), rows_per_step=4, seed=0, last_batch="drop")
    cursor = batches.start()
    for _ in range(3):
        cursor = batches.advance(cursor)
    assert batches.progress(cursor) == 3
    assert batches.passes(cursor) == Fraction(12, 7)
