"""Samples row after row: the form in which rows are filled, packed again and mixed."""

from dataclasses import dataclass

import numpy as np

from penstock.rows.bin_plan import Indices, PackingPlan, Sizes
from penstock.rows.packing.patterns import Patterns
from penstock.rows.packing.sorting import ranges, stable_argsort


@dataclass
class Rows:
    """Rows of samples, none of them empty."""

    lengths: Sizes
    """Of every sample, by its index."""
    samples: Sizes
    starts: Indices
    """Row i holds `samples[starts[i]:starts[i] + widths[i]]`; what no row holds is void."""
    widths: Indices
    totals: Indices
    """The tokens in every row."""
    capacity: int

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.widths)

    def held(self, rows: Indices) -> Indices:
        """The samples of these rows, one row after another."""
        found = ranges(self.starts[rows], self.widths[rows])
        found[:] = self.samples[found]
        return found

    def replace(self, rows: Indices, other: "Rows") -> None:
        """Have the other's rows, of the same samples, instead of these."""
        self.starts = np.concatenate(
            [np.delete(self.starts, rows), other.starts + len(self.samples)]
        )
        self.widths = np.concatenate([np.delete(self.widths, rows), other.widths])
        self.totals = np.concatenate([np.delete(self.totals, rows), other.totals])
        self.samples = np.concatenate([self.samples, other.samples])

    def bins(self, first: int, rng: np.random.Generator) -> PackingPlan:
        """The rows in random order; the samples are numbered from `first`."""
        order = rng.permutation(self.num_rows)
        samples = self.held(order)
        samples += first
        return PackingPlan(samples, np.cumsum(self.widths[order]))


@dataclass
class Slots:
    """Where a plan puts samples: as many next to each other as it puts in a row at once."""

    length: Indices
    row: Indices
    each: Indices
    """How many."""
    held: Indices
    """How many others stand before them in that row."""
    num_rows: int

    def widths(self) -> Indices:
        """How many samples each row is given."""
        return np.bincount(self.row, self.each, self.num_rows).astype(np.int64)

    def totals(self) -> Indices:
        """How many tokens each row is given."""
        return np.bincount(self.row, self.each * self.length, self.num_rows).astype(np.int64)

    def places(self, starts: Indices) -> Indices:
        """Where each sample goes, the shortest first, if row i has its places from `starts[i]`."""
        return ranges(starts[self.row] + self.held, self.each)


def plan_slots(plan: Patterns) -> Slots:
    """What a plan says, the shortest samples first."""
    table = np.array(plan.placed, dtype=np.int64).reshape(-1, 5)
    length, first, rows, each, held = table[np.argsort(table[:, 0], kind="stable")].T
    length, each, held = (np.repeat(column, rows) for column in (length, each, held))
    return Slots(length, ranges(first, rows), each, held, plan.num_rows)


def planned(lengths: Sizes, samples: Sizes, plan: Patterns, capacity: int) -> Rows:
    """The rows of a plan for these samples.

    Samples of a length are dealt to the rows that want one in the order given.
    """
    slots = plan_slots(plan)
    widths = slots.widths()
    starts = row_starts(widths)
    placed = np.empty_like(samples)
    placed[slots.places(starts)] = samples[stable_argsort(lengths[samples], capacity)]
    return Rows(lengths, placed, starts, widths, slots.totals(), capacity)


def row_starts(widths: Indices) -> Indices:
    """Where each row begins."""
    return np.cumsum(widths) - widths
