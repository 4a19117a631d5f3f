"""State of sample selection: which samples are kept, which were dropped, and why."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.prepare.select.features import Array
from penstock.prepare.select.near_duplicates import compute_shingles
from penstock.prepare.select.ngrams import Hashes, iter_samples
from penstock.prepare.slices import TokenizedSlice
from penstock.rows.arrow import map_batches
from penstock.rows.sample_order import Indices

Mask = npt.NDArray[np.bool_]
DropReason = Literal["max_samples", "contaminated", "exact_duplicate", "near_duplicate"]

EXAMPLES = 3
"""Maximum examples per reason."""

SHINGLE_CACHE_SIZE = 4096
"""Number of samples whose shingles are cached during near deduplication."""


class FilterState:
    """Slices, identified by their index, and masks of the samples that are kept."""

    def __init__(self, finished: Sequence[TokenizedSlice]) -> None:
        """Starts with all samples kept."""
        self.finished = finished
        self.keep_masks: list[Mask] = [np.ones(tally.rows, dtype=bool) for _, _, tally in finished]
        self.dropped: list[Counter[str]] = [Counter() for _ in finished]
        self.examples: list[dict[str, Any]] = []
        self._num_examples: Counter[str] = Counter()

    def slice_indices(self, role: str) -> list[int]:
        """Indices of the slices of a role, in order."""
        return [index for index, (item, *_) in enumerate(self.finished) if item.role == role]

    def drop(self, slice_index: int, rows: Indices, reason: DropReason) -> list[int]:
        """Drop samples of a slice. Returns those to report with `add_example`."""
        self.keep_masks[slice_index][rows] = False
        if len(rows):
            self.dropped[slice_index][reason] += len(rows)
        reported = rows[: EXAMPLES - self._num_examples[reason]].tolist()
        self._num_examples[reason] += len(reported)
        return reported

    def add_example(self, slice_index: int, row: int, reason: DropReason, why: str) -> None:
        """Record a dropped sample as an example; `why` is a sentence."""
        item, path, _ = self.finished[slice_index]
        location = {"source": item.label, "slice": item.key, "row": record_index(path, row)}
        self.examples.append({**location, "reason": reason, "why": why})


class SamplePool:
    """The kept samples of several slices, numbered consecutively."""

    def __init__(self, choice: FilterState, slice_indices: Sequence[int]) -> None:
        """Numbers the samples that are kept now; samples dropped later keep their numbers."""
        self._state, self._slices = choice, slice_indices
        self._rows = [np.flatnonzero(choice.keep_masks[index]) for index in slice_indices]
        self._starts = np.cumsum([0, *map(len, self._rows)], dtype=np.int64)
        # Of the instance: a cache of the module would keep the files mapped.
        self._open = lru_cache(64)(_map_with_starts)
        self.shingles = lru_cache(SHINGLE_CACHE_SIZE)(self._shingles)

    def num_samples_in(self, num_slices: int) -> int:
        """Number of samples in the first `num_slices` slices."""
        return int(self._starts[num_slices])

    def gather(self, arrays: Sequence[Array]) -> Array:
        """Concatenate the pool's samples from arrays of the slices (last dimension: samples)."""
        parts = [array[..., rows] for array, rows in zip(arrays, self._rows, strict=True)]
        return np.concatenate(parts, axis=-1)

    def drop(self, samples: Indices, reason: DropReason) -> list[int]:
        """Drop samples (sorted). Returns those to report with `add_example`."""
        bounds = np.searchsorted(samples, self._starts)
        reported: list[int] = []
        for number, slice_index in enumerate(self._slices):
            slice_samples = samples[bounds[number] : bounds[number + 1]] - self._starts[number]
            rows = self._state.drop(slice_index, self._rows[number][slice_samples], reason)
            reported += (self._starts[number] + np.searchsorted(self._rows[number], rows)).tolist()
        return reported

    def add_example(self, sample: int, reason: DropReason, why: str) -> None:
        """Record a dropped sample as an example."""
        self._state.add_example(*self._locate(sample), reason, why)

    def describe(self, sample: int) -> str:
        """Description of a sample for messages."""
        slice_index, row = self._locate(sample)
        item, path, _ = self._state.finished[slice_index]
        return f"row {record_index(path, row)} of slice {item.key} ({item.label})"

    def _locate(self, sample: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return self._slices[number], int(self._rows[number][sample - self._starts[number]])

    def _shingles(self, sample: int) -> Hashes:
        slice_index, row = self._locate(sample)
        batches, starts = self._open(self._state.finished[slice_index][1])
        number = int(np.searchsorted(starts, row, side="right")) - 1
        [sample_ids] = iter_samples([batches[number].slice(row - int(starts[number]), 1)])
        return compute_shingles(sample_ids)


def record_index(path: Path, row: int) -> int:
    """Index of a sample's record in its slice, counting records without a sample."""
    batches, starts = _map_with_starts(path)
    number = int(np.searchsorted(starts, row, side="right")) - 1
    return batches[number].column("row")[row - int(starts[number])].as_py()


def _map_with_starts(path: Path) -> tuple[list[pa.RecordBatch], Indices]:
    batches = map_batches(path)
    return batches, np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
