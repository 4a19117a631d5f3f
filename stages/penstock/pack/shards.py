"""One file of packed rows: documents end to end, labels shifted once."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.core.files import publishing
from penstock.rows.bins import Bins, Indices
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import Tokens, flat, map_batches
from penstock.rows.schema import IGNORED, PACKED

BATCH_TOKENS = 4 << 20
"""Tokens in one record batch, about: what is held in memory at once."""


@dataclass(frozen=True)
class Written:
    """What is known of a file once its tokens have been seen."""

    trained_tokens: int
    max_token_id: int


def write(samples: PreparedSamples, bins: Bins, lengths: Indices, target: Path) -> Written:
    """Publish a file of these rows; `lengths` are those of `bins.samples`."""
    ends = np.cumsum(lengths)
    batches = list(_batches(bins, ends))
    room = max(int(ends[last - 1] - ends[first] + lengths[first]) for _, _, first, last in batches)
    # The same memory for every batch: fresh pages cost more than the copying.
    ids, labels = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int32)
    trained = largest = 0
    with (
        publishing(target) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, PACKED) as writer,
    ):
        for low, high, first, last in batches:
            sizes = lengths[first:last]
            here = np.cumsum(sizes)
            used = int(here[-1])
            _copy(samples, bins.samples[first:last], here, ids, labels)
            rows = np.concatenate([[0], bins.ends[low:high] - first])
            writer.write_batch(_batch(rows, here, sizes, ids[:used], labels[:used]))
            trained += int(np.count_nonzero(labels[:used] != IGNORED))
            largest = max(largest, int(ids[:used].max()))
    return Written(trained, largest)


def read(shard: Path) -> Written:
    """What `write` said when it wrote this file."""
    trained = largest = 0
    for batch in map_batches(shard):
        trained += int(np.count_nonzero(flat(batch.column("labels"))[0] != IGNORED))
        largest = max(largest, int(flat(batch.column("input_ids"))[0].max(initial=0)))
    return Written(trained, largest)


def _batches(bins: Bins, ends: Indices) -> Generator[tuple[int, int, int, int]]:
    """Runs of rows of about BATCH_TOKENS each, as (first row, row after the last, first sample,
    sample after the last)."""
    batch_of = (ends[bins.ends - 1] - 1) // BATCH_TOKENS
    cuts = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(bins)]
    for low, high in pairwise(cuts):
        yield low, high, int(bins.ends[low - 1]) if low else 0, int(bins.ends[high - 1])


def _copy(
    samples: PreparedSamples, chosen: Indices, ends: Indices, ids: Tokens, labels: Tokens
) -> None:
    """Lay the chosen samples end to end, each ending where `ends` says.

    In the order in which they are stored, so that files are read from front to back.
    """
    order = np.argsort(chosen)
    stored = samples.stored[""]
    files = np.searchsorted(samples.starts, chosen[order], side="right") - 1
    cuts = np.flatnonzero(np.diff(files, prepend=-1, append=len(stored)))
    to_ids, to_labels = ids.data, labels.data
    for cut, following in pairwise(cuts.tolist()):
        file = int(files[cut])
        some = order[cut:following]
        places = chosen[some] - samples.starts[file]
        offsets = stored[file].offsets
        from_ids, from_labels = stored[file].input_ids.data, stored[file].labels.data
        begins, stops = offsets[places].tolist(), offsets[places + 1].tolist()
        for begin, stop, end in zip(begins, stops, ends[some].tolist(), strict=True):
            start = end - (stop - begin)
            to_ids[start:end] = from_ids[begin:stop]
            # The one shift: a target stands at its cause.
            to_labels[start : end - 1] = from_labels[begin + 1 : stop]
    labels[ends - 1] = IGNORED


def _batch(
    rows: Indices, ends: Indices, lengths: Indices, ids: Tokens, labels: Tokens
) -> pa.RecordBatch:
    """A record batch of rows that begin at the samples `rows`; the last entry ends the last."""
    tokens = pa.array(np.concatenate([[0], ends])[rows].astype(np.int32))
    documents = pa.array(rows.astype(np.int32))
    columns = [
        pa.ListArray.from_arrays(tokens, pa.array(ids)),
        pa.ListArray.from_arrays(tokens, pa.array(labels)),
        pa.ListArray.from_arrays(documents, pa.array(lengths.astype(np.int32))),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PACKED)
