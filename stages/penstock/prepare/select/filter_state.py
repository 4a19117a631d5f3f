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
from penstock.rows.reader import map_batches
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

    def slices_at(self, places: Sequence[int]) -> list[TokenizedSlice]:
        """The slices with these indices."""
        return [self.finished[place] for place in places]

    def drop(self, place: int, rows: Indices, reason: DropReason) -> list[int]:
        """Drop samples of a slice. Returns those to report with `add_example`."""
        self.keep_masks[place][rows] = False
        if len(rows):
            self.dropped[place][reason] += len(rows)
        reported = rows[: EXAMPLES - self._num_examples[reason]].tolist()
        self._num_examples[reason] += len(reported)
        return reported

    def add_example(self, place: int, row: int, reason: DropReason, why: str) -> None:
        """Record a dropped sample as an example; `why` is a sentence."""
        item, path, _ = self.finished[place]
        where = {"source": item.label, "slice": item.key, "row": record_index(path, row)}
        self.examples.append({**where, "reason": reason, "why": why})


class SamplePool:
    """The kept samples of several slices, numbered consecutively."""

    def __init__(self, choice: FilterState, places: Sequence[int]) -> None:
        """Numbers the samples that are kept now; samples dropped later keep their numbers."""
        self._state, self._slices = choice, places
        self._rows = [np.flatnonzero(choice.keep_masks[place]) for place in places]
        self._starts = np.cumsum([0, *map(len, self._rows)], dtype=np.int64)
        self._open = lru_cache(64)(_map_with_starts)
        self.shingles = lru_cache(SHINGLE_CACHE_SIZE)(self._shingles)

    def num_samples_in(self, places: int) -> int:
        """Number of samples in the first `places` slices."""
        return int(self._starts[places])

    def gather(self, arrays: Sequence[Array]) -> Array:
        """Concatenate the pool's samples from arrays of the slices (last dimension: samples)."""
        parts = [array[..., rows] for array, rows in zip(arrays, self._rows, strict=True)]
        return np.concatenate(parts, axis=-1)

    def drop(self, samples: Indices, reason: DropReason) -> list[int]:
        """Drop samples (sorted). Returns those to report with `add_example`."""
        bounds = np.searchsorted(samples, self._starts)
        reported: list[int] = []
        for number, place in enumerate(self._slices):
            its = samples[bounds[number] : bounds[number + 1]] - self._starts[number]
            rows = self._state.drop(place, self._rows[number][its], reason)
            reported += (self._starts[number] + np.searchsorted(self._rows[number], rows)).tolist()
        return reported

    def add_example(self, sample: int, reason: DropReason, why: str) -> None:
        """Record a dropped sample as an example."""
        self._state.add_example(*self._locate(sample), reason, why)

    def describe(self, sample: int) -> str:
        """Description of a sample for messages."""
        place, row = self._locate(sample)
        item, path, _ = self._state.finished[place]
        return f"row {record_index(path, row)} of slice {item.key} ({item.label})"

    def _locate(self, sample: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return self._slices[number], int(self._rows[number][sample - self._starts[number]])

    def _shingles(self, sample: int) -> Hashes:
        place, row = self._locate(sample)
        batches, starts = self._open(self._state.finished[place][1])
        number = int(np.searchsorted(starts, row, side="right")) - 1
        [found] = iter_samples(batches[number].slice(row - int(starts[number]), 1))
        return compute_shingles(found)


def record_index(path: Path, row: int) -> int:
    """Index of a sample's record in its slice, counting records without a sample."""
    batches, starts = _map_with_starts(path)
    number = int(np.searchsorted(starts, row, side="right")) - 1
    return batches[number].column("row")[row - int(starts[number])].as_py()


def _map_with_starts(path: Path) -> tuple[list[pa.RecordBatch], Indices]:
    batches = map_batches(path)
    return batches, np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
