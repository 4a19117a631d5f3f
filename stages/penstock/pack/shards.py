"""One file of packed rows: the documents of samples end to end."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.core.files import atomic_write
from penstock.pack.layout import RowSamples
from penstock.rows.bin_plan import Indices, PackingPlan
from penstock.rows.reader import Tokens, flat, map_batches
from penstock.rows.schema import IGNORED, packed_schema

BATCH_TOKENS = 4 << 20
"""Tokens in one record batch, about: what is held in memory at once."""


@dataclass(frozen=True)
class ShardStats:
    """What is known of a file once its tokens have been seen."""

    trained_tokens: int
    max_token_id: int


def write_shard(
    form: RowSamples, bins: PackingPlan, sizes: Indices, target: Path, begins: Indices | None = None
) -> ShardStats:
    """Publish a file of these rows. `bins.samples` have `sizes`, or are pieces of samples that have
    these sizes and begin at the tokens `begins`."""
    ends = np.cumsum(sizes)
    batches = list(_batches(bins, ends))
    room = max(int(ends[last - 1] - ends[first] + sizes[first]) for _, _, first, last in batches)
    # The same memory for every batch: fresh pages cost more than the copying.
    ids, labels = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int32)
    trained = largest = 0
    with (
        atomic_write(target) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, _schema(form)) as writer,
    ):
        for low, high, first, last in batches:
            chosen = bins.samples[first:last]
            here = np.cumsum(sizes[first:last])
            used = int(here[-1])
            its = None if begins is None else begins[first:last]
            form.write_tokens(chosen, here, ids, labels, its)
            rows = np.concatenate([[0], bins.ends[low:high] - first])
            writer.write_batch(_batch(form, chosen, rows, here, ids[:used], labels[:used]))
            trained += int(np.count_nonzero(labels[:used] != IGNORED))
            largest = max(largest, int(ids[:used].max()))
    return ShardStats(trained, largest)


def read_shard_stats(shard: Path) -> ShardStats:
    """What `write` said when it wrote this file."""
    trained = largest = 0
    for batch in map_batches(shard):
        trained += int(np.count_nonzero(flat(batch.column("labels"))[0] != IGNORED))
        largest = max(largest, int(flat(batch.column("input_ids"))[0].max(initial=0)))
    return ShardStats(trained, largest)


def _batches(bins: PackingPlan, ends: Indices) -> Generator[tuple[int, int, int, int]]:
    """Runs of rows of about BATCH_TOKENS each, as (first row, row after the last, first sample,
    sample after the last)."""
    batch_of = (ends[bins.ends - 1] - 1) // BATCH_TOKENS
    cuts = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(bins)]
    for low, high in pairwise(cuts):
        yield low, high, int(bins.ends[low - 1]) if low else 0, int(bins.ends[high - 1])


def _batch(
    form: RowSamples, chosen: Indices, rows: Indices, ends: Indices, ids: Tokens, labels: Tokens
) -> pa.RecordBatch:
    """A record batch of rows that begin at the samples `rows`; the last entry ends the last."""
    tokens = pa.array(np.concatenate([[0], ends])[rows].astype(np.int32))
    documents = pa.array((rows * form.documents_per_sample).astype(np.int32))
    lengths = form.document_lengths(chosen, np.diff(ends, prepend=0))
    columns = [
        pa.ListArray.from_arrays(tokens, pa.array(ids)),
        pa.ListArray.from_arrays(tokens, pa.array(labels)),
        pa.ListArray.from_arrays(documents, pa.array(lengths.astype(np.int32))),
        *form.extra_columns(chosen, rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_schema(form))


def _schema(form: RowSamples) -> pa.Schema:
    return packed_schema(form.samples.kind, is_scored=form.samples.is_scored)
