"""Writing rows: documents end to end, labels shifted once, one Arrow file at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.files import publishing
from penstock.rows.bins import Bins
from penstock.rows.order import Indices
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import flat, map_batches
from penstock.rows.schema import IGNORED, PACKED, histogram

SHARD_BYTES = 256 << 20
BYTES_PER_TOKEN = 8
BATCH_TOKENS = 4 << 20
"""Tokens in one record batch, about: what is held in memory at once."""


@dataclass(frozen=True)
class Packing:
    """Rows planned for one split: `bins` over `samples`, whose lengths are `lengths`."""

    samples: PreparedSamples
    bins: Bins
    lengths: Indices

    def num_shards(self, wanted: int | None) -> int:
        """Files to write: as many as wanted, or by size; never more than rows."""
        by_size = -(-int(self.lengths.sum()) * BYTES_PER_TOKEN // SHARD_BYTES)
        return max(1, min(wanted or by_size, len(self.bins)))


def shard_name(index: int, count: int) -> str:
    """What shard `index` of `count` is called."""
    return f"rows-{index:05d}-of-{count:05d}.arrow"


def write_shards(packing: Packing, folder: Path, count: int) -> list[Path]:
    """Write `count` shards of about equally many rows, skipping those that are there."""
    targets = [folder / shard_name(index, count) for index in range(count)]
    for index, target in enumerate(targets):
        if not target.exists():
            first, last = (len(packing.bins) * i // count for i in (index, index + 1))
            _write(packing, target, first, last)
    return targets


def measure(shards: list[Path], capacity: int) -> dict[str, Any]:
    """Counts over all shards of a split; `fill` is the share of `capacity` that holds tokens."""
    rows = tokens = trained = largest = 0
    documents: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    for shard in shards:
        for batch in map_batches(shard):
            ids, _ = flat(batch.column("input_ids"))
            labels, _ = flat(batch.column("labels"))
            largest = max(largest, int(ids.max(initial=0)))
            rows += batch.num_rows
            tokens += len(labels)
            trained += int((labels != IGNORED).sum())
            documents.append(flat(batch.column("lengths"))[0])
    lengths = np.concatenate(documents)
    return {
        "rows": rows,
        "documents": len(lengths),
        "tokens": tokens,
        "trained_tokens": trained,
        "max_token_id": largest,
        "fill": round(tokens / (rows * capacity), 6) if rows else 0.0,
        "lengths": histogram(lengths),
    }


def _write(packing: Packing, target: Path, first: int, last: int) -> None:
    with (
        publishing(target) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, PACKED) as writer,
    ):
        for low, high in _batches(packing, first, last):
            writer.write_batch(_batch(packing, low, high))


def _batches(packing: Packing, first: int, last: int) -> list[tuple[int, int]]:
    """Runs of rows of about BATCH_TOKENS each."""
    found: list[tuple[int, int]] = []
    low, tokens = first, 0
    for row in range(first, last):
        tokens += int(packing.lengths[packing.bins.row(row)].sum())
        if tokens >= BATCH_TOKENS:
            found.append((low, row + 1))
            low, tokens = row + 1, 0
    return found + ([(low, last)] if low < last else [])


def _batch(packing: Packing, low: int, high: int) -> pa.RecordBatch:
    start = int(packing.bins.ends[low - 1]) if low else 0
    row_ends = packing.bins.ends[low:high] - start
    chosen = packing.bins.samples[start : start + int(row_ends[-1])]
    lengths = packing.lengths[chosen]
    ends = np.cumsum(lengths)
    ids = np.empty(int(ends[-1]), dtype=np.int32)
    labels = np.empty_like(ids)
    at = 0
    for sample_ids, sample_labels in packing.samples.samples(chosen):
        end = at + len(sample_ids)
        ids[at:end] = sample_ids
        labels[at : end - 1] = sample_labels[1:]  # the one shift: a target stands at its cause
        at = end
    labels[ends - 1] = IGNORED
    tokens_per_row = pa.array(np.concatenate([[0], ends[row_ends - 1]]).astype(np.int32))
    documents_per_row = pa.array(np.concatenate([[0], row_ends]).astype(np.int32))
    return pa.RecordBatch.from_arrays(
        [
            pa.ListArray.from_arrays(tokens_per_row, pa.array(ids)),
            pa.ListArray.from_arrays(tokens_per_row, pa.array(labels)),
            pa.ListArray.from_arrays(documents_per_row, pa.array(lengths.astype(np.int32))),
        ],
        schema=PACKED,
    )
