"""Samples row after row: the form in which rows are filled, packed again and mixed."""

from dataclasses import dataclass

import numpy as np

from penstock.rows.bins import Bins, Indices, Sizes
from penstock.rows.packing.patterns import Patterns
from penstock.rows.packing.sorting import order_of, ranges


@dataclass
class Rows:
    """Rows of samples, none of them empty."""

    samples: Indices
    """Row after row."""
    sizes: Sizes
    """The lengths of `samples`."""
    widths: Indices
    """How many samples each row has."""
    capacity: int

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.widths)

    def totals(self) -> Indices:
        """The tokens in every row."""
        return np.add.reduceat(self.sizes, starts_of(self.widths), dtype=np.int64)

    def take(self, order: Indices, widths: Indices) -> None:
        """Rows of `widths` of the samples that stand where `order` says, in that order."""
        self.samples, self.sizes, self.widths = self.samples[order], self.sizes[order], widths

    def bins(self, rng: np.random.Generator) -> Bins:
        """The rows in random order."""
        order = rng.permutation(self.num_rows)
        widths = self.widths[order]
        places = ranges(starts_of(self.widths)[order], widths)
        return Bins(self.samples[places], np.cumsum(widths))


@dataclass
class Slots:
    """Where a plan puts samples: as many next to each other as it puts in a row at once."""

    row: Indices
    each: Indices
    """How many."""
    held: Indices
    """How many others stand before them in that row."""
    num_rows: int

    def widths(self) -> Indices:
        """How many samples each row is given."""
        return np.bincount(self.row, self.each, self.num_rows).astype(np.int64)

    def places(self, starts: Indices) -> Indices:
        """Where each sample goes, the shortest first, if row i has its places from `starts[i]`."""
        return ranges(starts[self.row] + self.held, self.each)


def slots_of(plan: Patterns) -> Slots:
    """What a plan says, the shortest samples first."""
    table = np.array(plan.placed, dtype=np.int64).reshape(-1, 5)
    _, first, rows, each, held = table[np.argsort(table[:, 0], kind="stable")].T
    return Slots(ranges(first, rows), np.repeat(each, rows), np.repeat(held, rows), plan.num_rows)


def planned(sizes: Sizes, plan: Patterns, capacity: int) -> tuple[Indices, Indices]:
    """The samples of a plan row after row, and how many each row has.

    Samples of a length are dealt to the rows that want one in the order given.
    """
    slots = slots_of(plan)
    widths = slots.widths()
    order = np.empty(len(sizes), dtype=np.int64)
    order[slots.places(starts_of(widths))] = order_of(sizes, capacity)
    return order, widths


def starts_of(widths: Indices) -> Indices:
    """Where each row begins."""
    return np.cumsum(widths) - widths
