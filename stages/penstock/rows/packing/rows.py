"""Mutable rows of samples, for filling, repacking and mixing."""

from dataclasses import dataclass

import numpy as np

from penstock.rows.bin_plan import Indices, PackingPlan, Sizes
from penstock.rows.packing.best_fit import Patterns
from penstock.rows.packing.sorting import ranges, stable_argsort


@dataclass
class Rows:
    """Non-empty rows of samples."""

    lengths: Sizes
    """Length of every sample, by sample index."""
    samples: Sizes
    starts: Indices
    """Row i is `samples[starts[i]:starts[i] + widths[i]]`; other entries are unused."""
    widths: Indices
    totals: Indices
    """Number of tokens of every row."""
    capacity: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.widths)

    def samples_in(self, rows: Indices) -> Indices:
        """Sample indices of these rows, row by row."""
        slots = ranges(self.starts[rows], self.widths[rows])
        slots[:] = self.samples[slots]
        return slots

    def replace(self, rows: Indices, replacement: "Rows") -> None:
        """Replace these rows by the rows of `replacement`, which contain the same samples."""
        self.starts = np.concatenate(
            [np.delete(self.starts, rows), replacement.starts + len(self.samples)]
        )
        self.widths = np.concatenate([np.delete(self.widths, rows), replacement.widths])
        self.totals = np.concatenate([np.delete(self.totals, rows), replacement.totals])
        self.samples = np.concatenate([self.samples, replacement.samples])

    def bins(self, first: int, rng: np.random.Generator) -> PackingPlan:
        """The rows in random order as a plan; `first` is added to the sample indices."""
        order = rng.permutation(self.num_rows)
        samples = self.samples_in(order)
        samples += first
        return PackingPlan(samples, np.cumsum(self.widths[order]))


@dataclass
class Slots:
    """Placements of a plan, one entry per row and length: consecutive samples of equal length."""

    length: Indices
    row: Indices
    count: Indices
    """Number of samples."""
    num_before: Indices
    """Number of samples before them in the row."""
    num_rows: int

    def widths(self) -> Indices:
        """Number of samples that each row gets."""
        return np.bincount(self.row, self.count, self.num_rows).astype(np.int64)

    def totals(self) -> Indices:
        """Number of tokens that each row gets."""
        return np.bincount(self.row, self.count * self.length, self.num_rows).astype(np.int64)

    def places(self, starts: Indices) -> Indices:
        """Position of each sample, shortest first, if row i starts at `starts[i]`."""
        return ranges(starts[self.row] + self.num_before, self.count)


def plan_slots(plan: Patterns) -> Slots:
    """Expand a plan to slots, shortest samples first."""
    table = np.array(plan.placed, dtype=np.int64).reshape(-1, 5)
    length, first, rows, per_row, held = table[np.argsort(table[:, 0], kind="stable")].T
    length, per_row, held = (np.repeat(column, rows) for column in (length, per_row, held))
    return Slots(length, ranges(first, rows), per_row, held, plan.num_rows)


def build_rows(lengths: Sizes, samples: Sizes, plan: Patterns, capacity: int) -> Rows:
    """Build the rows of a plan from these samples.

    Samples of equal length are assigned to rows in the order given.
    """
    slots = plan_slots(plan)
    widths = slots.widths()
    starts = row_starts(widths)
    placed = np.empty_like(samples)
    placed[slots.places(starts)] = samples[stable_argsort(lengths[samples], capacity)]
    return Rows(lengths, placed, starts, widths, slots.totals(), capacity)


def row_starts(widths: Indices) -> Indices:
    """Start index of each row."""
    return np.cumsum(widths) - widths
