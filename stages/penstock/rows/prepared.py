"""Prepared samples on disk: the slices of one split as one sequence, mapped into memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.files import read_json
from penstock.rows.order import Indices, Ordering, global_order
from penstock.rows.reader import Tokens, flat, map_batches

PLAN = "plan.json"


class PreparedSamples:
    """The samples of one split, numbered through its slices as plan.json lists them."""

    def __init__(self, folder: Path, split: str) -> None:
        """Map the split of the prepared artifact in `folder`; a split without files is empty."""
        plan: dict[str, Any] = read_json(folder / PLAN)
        self.split = split
        self._slices: list[dict[str, Any]] = plan["splits"][split]
        self._ordering = Ordering.of_plan(plan)
        batches = [batch for entry in self._slices for batch in map_batches(folder / entry["file"])]
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ids = [flat(_lists(batch, "input_ids")) for batch in self._batches]
        self._labels = [flat(_lists(batch, "labels"))[0] for batch in self._batches]
        sizes = [batch.num_rows for batch in self._batches]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def lengths(self) -> Indices:
        """Tokens of every sample."""
        parts = [np.diff(offsets).astype(np.int64) for _, offsets in self._ids]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def datasets(self) -> Indices:
        """Of which data set (its place in the settings) every sample is."""
        rows = [entry["rows"] for entry in self._slices]
        return np.repeat(np.array([e["dataset"] for e in self._slices], dtype=np.int64), rows)

    def order(self) -> Indices:
        """The order in which samples are to be used: planned for training, stored for others."""
        if self.split != "train":
            return np.arange(len(self), dtype=np.int64)
        of = self.datasets()
        return global_order(np.bincount(of).tolist() if len(of) else [], self._ordering)

    def samples(self, indices: Indices) -> Iterable[tuple[Tokens, Tokens]]:
        """(input_ids, unshifted labels) of each sample, as views of the files."""
        batches = np.searchsorted(self._starts, indices, side="right") - 1
        places = indices - self._starts[batches]
        for batch, place in zip(batches.tolist(), places.tolist(), strict=True):
            ids, offsets = self._ids[batch]
            start, end = offsets[place], offsets[place + 1]
            yield ids[start:end], self._labels[batch][start:end]


def _lists(batch: pa.RecordBatch, name: str) -> pa.ListArray:
    column = batch.column(name)
    assert isinstance(column, pa.ListArray)
    return column
