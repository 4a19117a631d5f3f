"""Write one Arrow file of packed rows."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.core.cache.attempt_files import finished_write
from penstock.pack.plan_rows import RowSamples
from penstock.rows.arrow import Tokens, Weights, flat, list_array, map_batches, to_arrow
from penstock.rows.bin_plan import Indices, PackingPlan
from penstock.rows.schema import IGNORED, packed_schema

BATCH_TOKENS = 4 << 20
"""Approximate tokens per record batch, which is kept in memory."""


@dataclass(frozen=True)
class ShardStats:
    """Statistics of a file's tokens."""

    trained: Indices
    """Number of trained tokens of each sample, or piece of one, in order."""
    max_token_id: int


def write_shard(
    form: RowSamples, bins: PackingPlan, sizes: Indices, target: Path, begins: Indices | None = None
) -> ShardStats:
    """Write a file of these rows. `sizes` are the tokens of each entry of `bins.samples`; with
    `begins`, entries are pieces that start at these tokens of their samples."""
    ends = np.cumsum(sizes)
    # Ranges of rows with about BATCH_TOKENS each: (first row, end row, first sample, end sample).
    batch_of = (ends[bins.ends - 1] - 1) // BATCH_TOKENS
    cuts = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(bins)]
    batches = [
        (low, high, int(bins.ends[low - 1]) if low else 0, int(bins.ends[high - 1]))
        for low, high in pairwise(cuts)
    ]
    room = max(int(ends[last - 1] - ends[first] + sizes[first]) for _, _, first, last in batches)
    # Reuse the buffers for every batch: page faults of new memory cost more than the copies.
    ids, labels = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int32)
    weights = np.empty(room, dtype=np.float32) if form.samples.is_weighted else None
    trained, largest = [np.empty(0, np.int64)], 0
    with (
        finished_write(target) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, _schema(form)) as writer,
    ):
        for low, high, first, last in batches:
            chosen = bins.samples[first:last]
            offsets = np.cumsum(sizes[first:last])
            used = int(offsets[-1])
            batch_begins = None if begins is None else begins[first:last]
            form.write_tokens(chosen, offsets, ids, labels, weights, batch_begins)
            rows = np.concatenate([[0], bins.ends[low:high] - first])
            own = None if weights is None else weights[:used]
            writer.write_batch(_batch(form, chosen, rows, offsets, ids[:used], labels[:used], own))
            trained.append(_count_trained(labels[:used], offsets))
            largest = max(largest, int(ids[:used].max()))
    return ShardStats(np.concatenate(trained), largest)


def read_shard_stats(shard: Path, sizes: Indices) -> ShardStats:
    """The statistics of a file that was written before; `sizes` as for `write_shard`."""
    batches = map_batches(shard)
    columns = [flat(batch.column("labels"))[0] for batch in batches]
    labels = np.concatenate([np.empty(0, np.int32), *columns])
    ids = [flat(batch.column("input_ids"))[0] for batch in batches]
    largest = max((int(tokens.max(initial=0)) for tokens in ids), default=0)
    return ShardStats(_count_trained(labels, np.cumsum(sizes)), largest)


def _count_trained(labels: Tokens, ends: Indices) -> Indices:
    """Number of labels that are trained in each range of tokens; `ends` are the ends of ranges."""
    # Sums over all tokens, as `cumsum` would compute, take 7 to 36 times as long.
    trained = np.flatnonzero(labels != IGNORED)
    return np.diff(np.searchsorted(trained, ends), prepend=0)


def _batch(
    form: RowSamples,
    chosen: Indices,
    rows: Indices,
    ends: Indices,
    ids: Tokens,
    labels: Tokens,
    weights: Weights | None,
) -> pa.RecordBatch:
    """Build a record batch. `rows` are the indices of each row's first sample, then the number of
    samples."""
    tokens = np.concatenate([[0], ends])[rows]
    lengths = form.document_lengths(chosen, np.diff(ends, prepend=0)).astype(np.int32)
    columns = [
        list_array(tokens, to_arrow(ids)),
        list_array(tokens, to_arrow(labels)),
        list_array(rows * form.documents_per_sample, to_arrow(lengths)),
        *([] if weights is None else [list_array(tokens, to_arrow(weights))]),
        *form.extra_columns(chosen, rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_schema(form))


def _schema(form: RowSamples) -> pa.Schema:
    samples = form.samples
    return packed_schema(
        samples.kind,
        is_scored=samples.is_scored,
        has_images=samples.has_images,
        is_weighted=samples.is_weighted,
    )
