"""Which packed rows make up which optimizer step, for any number of replicas.

A step is a set of rows chosen before anyone asks how many replicas share the work, so the layout
never changes what is learnt from. A position is a cursor of four numbers, kept in checkpoints: a
run that goes on from there, on other ranks or with other batch sizes, sees every row that is left
of the epoch exactly once, and then goes on with epochs of its own.

An epoch is a random permutation of its rows. Where rows cost different amounts of work, those of
similar cost are then brought together, so that replicas that share a step end it together: within
windows of the permutation rows are sorted by cost and cut into groups, and the groups are shuffled.
Small steps stay random: few replicas can share one, and a step of a few rows that are all alike
teaches worse (the built-in sample with two rows to a step: 78 % of held-out answers right, not 98).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.config.schema.data import LastBatch
from penstock.rows.sizing import keeps_rest

Integers = npt.NDArray[np.int64]

MIN_GROUP = 8
"""Rows of one group, at least: smaller steps are left as the permutation has them."""

MAX_GROUP = 256
"""Most rows of one group; larger steps are made of several, so that they stay varied."""

WINDOW = 64
"""Groups that are sorted by cost together, about."""

MIN_WINDOWS = 4
"""Windows in an epoch, at least: rows meet others in every epoch, also where there are few."""

EVEN_PERCENT = 101
"""Where no row costs more than this share of the mean, there is nothing to bring together."""


@dataclass(frozen=True)
class Cursor:
    """A place in the data: the next row is number `samples` of epoch `epoch`, both from 0.

    `seed` and `group` say how that epoch was ordered, which may differ from how the next one is.
    """

    epoch: int
    samples: int
    seed: int
    group: int


class StepSampler:
    """Steps of `rows_per_step` rows, reshuffled every epoch."""

    def __init__(
        self,
        costs: Integers,
        *,
        rows_per_step: int,
        seed: int,
        last_batch: LastBatch,
        epoch_rows: Sequence[int] = (),
    ) -> None:
        """`costs` are the rows' work in any unit, in stored order.

        `epoch_rows`: rows of each epoch that was laid out, one after another; epochs take them in
        turn. Empty: all rows in every epoch. With `last_batch` "drop", the rows that do not fill
        the last step of an epoch are left out (others each time), unless they are all there is;
        with "drop_few", only where they are at most `sizing.FEW_ROWS` of the epoch.
        Raises ValueError for an epoch without rows or of rows that are not there.
        """
        blocks = list(epoch_rows) or [len(costs)]
        if min(blocks) < 1 or sum(blocks) != len(costs) or rows_per_step < 1:
            raise ValueError(f"{len(costs)} rows in epochs of {blocks}, {rows_per_step} to a step")
        self.costs, self.rows_per_step, self.seed = costs, rows_per_step, seed
        self._last_batch: LastBatch = last_batch
        self._blocks = blocks
        self._starts = np.cumsum([0, *blocks]).tolist()
        self._drawn: tuple[Cursor, Integers] | None = None

    @property
    def group(self) -> int:
        """Rows that are brought together in this run's own epochs; 1: none are."""
        sizes = range(MIN_GROUP, min(self.rows_per_step, MAX_GROUP) + 1)
        return max((size for size in sizes if self.rows_per_step % size == 0), default=1)

    def start(self, epoch: int = 0) -> Cursor:
        """The beginning of an epoch."""
        return Cursor(epoch, 0, self.seed, self.group)

    def clamp(self, cursor: Cursor) -> Cursor:
        """The cursor itself, or the next epoch's beginning if its own has no step left."""
        return cursor if self._steps_in_epoch(cursor) else self.start(cursor.epoch + 1)

    def rows(self, cursor: Cursor) -> Integers:
        """All rows of the step at a settled cursor."""
        order = self._order(cursor)
        return order[cursor.samples : cursor.samples + self.rows_per_step]

    def advance(self, cursor: Cursor) -> Cursor:
        """The settled cursor behind the step at a settled cursor."""
        taken = min(self.rows_per_step, self._size(cursor.epoch) - cursor.samples)
        return self.clamp(replace(cursor, samples=cursor.samples + taken))

    def steps_until(self, epochs: Fraction | int, cursor: Cursor) -> int:
        """Steps from a settled cursor to the first place where `epochs` are done; 0 if that is not
        ahead."""
        whole = math.floor(epochs)
        steps = self._steps_to_epoch(whole, cursor)
        if whole == epochs or cursor.epoch > whole:
            return steps
        begin = cursor if cursor.epoch == whole else self.start(whole)
        rows = (epochs - whole) * self._used(begin) - begin.samples
        return steps + max(0, math.ceil(rows / self.rows_per_step))

    def steps_to_reach(
        self, amount: int, amounts: Integers, cursor: Cursor, *, most: int | None = None
    ) -> int:
        """Steps from a settled cursor until the `amounts` of their rows, above 0, come to `amount`
        together; or `most`, if that is fewer. Takes a pass over the rows for every epoch on the
        way."""
        steps = 0
        while amount > 0 and (most is None or steps < most):
            end = self._used(cursor)
            sums = np.cumsum(amounts[self._order(cursor)[cursor.samples : end]])
            whole = np.arange(self.rows_per_step, len(sums), self.rows_per_step)
            after_each = sums[np.append(whole, len(sums)) - 1]
            if after_each[-1] >= amount:
                steps += int(np.searchsorted(after_each, amount)) + 1
                break
            steps, amount = steps + len(after_each), amount - int(after_each[-1])
            cursor = self.start(cursor.epoch + 1)
        return steps if most is None else min(steps, most)

    def progress(self, cursor: Cursor) -> Fraction:
        """Epochs done at a settled cursor. A whole number exactly where an epoch begins."""
        return cursor.epoch + Fraction(cursor.samples, self._used(cursor))

    def passes(self, cursor: Cursor) -> Fraction:
        """Passes over the data up to a settled cursor, rows that were left out not counted."""
        rounds, rest = divmod(cursor.epoch, len(self._blocks))
        each = [
            Fraction(self._used(self.start(epoch)), size) for epoch, size in enumerate(self._blocks)
        ]
        begun = Fraction(cursor.samples, self._size(cursor.epoch))
        return rounds * sum(each, Fraction()) + sum(each[:rest], Fraction()) + begun

    def _size(self, epoch: int) -> int:
        return self._blocks[epoch % len(self._blocks)]

    def _used(self, cursor: Cursor) -> int:
        """Rows of the cursor's epoch that are in steps."""
        ahead = self._steps_in_epoch(cursor) * self.rows_per_step
        return min(cursor.samples + ahead, self._size(cursor.epoch))

    def _steps_to_epoch(self, epoch: int, cursor: Cursor) -> int:
        """Steps from a settled cursor to the beginning of `epoch`; 0 if that is not ahead."""
        if cursor.epoch >= epoch:
            return 0
        whole = [self._steps_in_epoch(self.start(later)) for later in range(len(self._blocks))]
        rounds, rest = divmod(epoch - cursor.epoch - 1, len(whole))
        first = cursor.epoch + 1
        further = sum(whole[(first + index) % len(whole)] for index in range(rest))
        return self._steps_in_epoch(cursor) + rounds * sum(whole) + further

    def _steps_in_epoch(self, cursor: Cursor) -> int:
        left = self._size(cursor.epoch) - cursor.samples
        whole, rest = divmod(max(0, left), self.rows_per_step)
        alone = not whole and not cursor.samples
        return whole + 1 if rest and (alone or self._keeps(cursor.epoch)) else whole

    def _keeps(self, epoch: int) -> bool:
        """Whether the epoch ends with a step of what is left of it."""
        return keeps_rest(self._size(epoch), self.rows_per_step, self._last_batch)

    def _order(self, cursor: Cursor) -> Integers:
        """The epoch's order. Kept, because drawing it costs a pass over all rows of the epoch."""
        drawn = replace(cursor, samples=0)
        if self._drawn is None or self._drawn[0] != drawn:
            start = self._starts[cursor.epoch % len(self._blocks)]
            costs = self.costs[start : start + self._size(cursor.epoch)]
            order = epoch_order(costs, cursor.group, [cursor.seed, cursor.epoch]) + start
            self._drawn = drawn, order
        return self._drawn[1]


def epoch_order(costs: Integers, group: int, seed: Sequence[int]) -> Integers:
    """A random order in which every `group` rows, from the start, cost about the same.

    Rows that fill no group come last and are random ones, not the dearest.
    """
    random = np.random.Generator(np.random.PCG64(list(seed)))
    order = random.permutation(len(costs))
    groups = len(costs) // group
    windows = max(MIN_WINDOWS, groups // WINDOW)
    even = 100 * len(costs) * int(costs.max()) <= EVEN_PERCENT * int(costs.sum())
    if group == 1 or groups < 2 * windows or even:
        return order
    ends = [index * groups // windows * group for index in range(windows + 1)]
    for start, end in pairwise(ends):
        here = order[start:end]
        here[:] = here[np.argsort(costs[here], kind="stable")]
    grouped = order[: groups * group].reshape(groups, group)
    grouped[:] = random.permuted(grouped[random.permutation(groups)], axis=1)
    return order


def assign_micro_batches(
    rows: Sequence[int],
    costs: Sequence[int],
    *,
    num_replicas: int,
    size: int,
    count: int,
) -> list[list[list[int]]]:
    """One step's rows for each replica, as exactly `count` micro-batches of at most `size` rows.

    Replicas compute their micro-batches at the same time and wait for each other, so the dearest
    rows make the first micro-batch of all replicas, and within it each row goes to the replica
    with the least work. Micro-batches may be short or empty at the end; none is left out, or
    collectives would wait for ever. Raises ValueError when the rows do not fit.
    """
    at_once = num_replicas * size
    if len(rows) > at_once * count:
        raise ValueError(f"{len(rows)} rows do not fit {count} micro-batches of {at_once}")
    dealt: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(num_replicas)]
    work = [0] * num_replicas
    dearest_first = sorted(range(len(rows)), key=lambda index: (-costs[index], index))
    for turn in range(math.ceil(len(rows) / at_once)):
        # The least work in this turn first, then the least so far.
        free = [(0, work[replica], replica) for replica in range(num_replicas)]
        heapify(free)
        for index in dearest_first[turn * at_once : (turn + 1) * at_once]:
            now, _, least = heappop(free)
            mine = dealt[least][turn]
            mine.append(rows[index])
            work[least] += costs[index]
            if len(mine) < size:
                heappush(free, (now + costs[index], work[least], least))
    return dealt
