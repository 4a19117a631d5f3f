"""Tokenize one slice: records to an Arrow file of samples, with counts."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.core.files import atomic_write
from penstock.prepare.bad_records import Tally, locate
from penstock.prepare.encode.backends import BackendMismatch
from penstock.prepare.encode.encoder import EncodedBatch, Encoder
from penstock.prepare.encode.ragged import dense_weights, to_offsets
from penstock.prepare.readers.records import Batch
from penstock.prepare.slices import Slice
from penstock.prepare.unread_columns import count_unread
from penstock.rows.arrow import binary_array, list_array, source_array, to_arrow
from penstock.rows.schema import (
    IMAGE_DIGEST_BYTES,
    IMAGES,
    LOSS_WEIGHTS,
    histogram,
    prepared_schema,
)

Read = Callable[[], Iterable[Batch]]
"""Reads the records of a slice, from the first one each time it is called."""


def tokenize(item: Slice, encode: Encoder, target: Path, read: Read) -> Tally:
    """Write the slice to `target`, and return the counts of its records.

    Samples keep the order of the source. Column `row` is the index of the record in the slice,
    counting dropped records. Raises StageError if a file is truncated.
    """
    is_weighted = False
    with atomic_write(target) as part:
        while True:
            try:
                return _write_samples(item, encode, part, read, is_weighted=is_weighted)
            except BackendMismatch:
                # fastokens gave wrong ids; it is not used again, and earlier batches are redone.
                continue
            except _WeightsFound:
                is_weighted = True


class _WeightsFound(Exception):  # noqa: N818 - caught within this module
    """The file was begun without a column of loss weights, and a sample has some."""


def _write_samples(
    item: Slice, encode: Encoder, part: Path, read: Read, *, is_weighted: bool
) -> Tally:
    tally = Tally()
    schema = prepared_schema(
        item.settings.kind,
        is_scored=item.settings.is_scored,
        has_images=encode.reads_images,
        is_weighted=is_weighted,
    )
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in read():
            samples = encode(batch.values, batch.folder)
            if not is_weighted and any(side.weights is not None for side in samples.sides):
                # An Arrow file has one schema, which is written first: it is begun again with the
                # column.
                raise _WeightsFound
            first = tally.records
            tally.records += len(batch.values)
            # In the order of records, since the first of each cause are its examples.
            for index, fault in sorted(samples.faults.items()):
                tally.drop_record(batch.file, batch.line(index), fault, batch.record(index))
            _count_batch(samples, tally)
            columns = count_unread(batch.values, item.settings, item.columns)
            for unread in (columns, samples.unread_keys):
                tally.unread += unread.counts
                for name, (index, value) in unread.examples.items():
                    if name not in tally.unread_examples:
                        location = locate(batch.file, batch.line(index), batch.record(index))
                        tally.unread_examples[name] = {**location, "value": value}
            writer.write_batch(_to_record_batch(samples, first, item.label, schema))
    tally.weighted = tally.rows if is_weighted else 0
    return tally


def _count_batch(samples: EncodedBatch, tally: Tally) -> None:
    lengths = [side.lengths for side in samples.sides]
    tally.rows += len(samples.records)
    tally.tokens += int(sum(length.sum() for length in lengths))
    tally.trained_tokens += int(sum(side.count_trained().sum() for side in samples.sides))
    tally.lengths += Counter(histogram(np.max(lengths, axis=0)))
    for name, count in samples.counts.items():
        setattr(tally, name, getattr(tally, name) + count)
    tally.images += sum(map(len, samples.images))


def _to_record_batch(
    samples: EncodedBatch, first: int, label: str, schema: pa.Schema
) -> pa.RecordBatch:
    columns: list[pa.Array] = []
    for side in samples.sides:
        columns += (list_array(side.offsets, to_arrow(v)) for v in (side.ids, side.labels))
    if "desirable" in schema.names:
        columns.append(to_arrow(np.array(samples.desirable, np.bool_)))
    if "score_gap" in schema.names:
        columns.append(to_arrow(np.array(samples.score_gaps, np.float32)))
    if LOSS_WEIGHTS.name in schema.names:
        [side] = samples.sides
        columns.append(list_array(side.offsets, to_arrow(dense_weights(side.labels, side.weights))))
    if IMAGES in schema.names:
        offsets = to_offsets([len(images) for images in samples.images])
        digests = [*chain.from_iterable(samples.images)]
        counts = np.array([*chain.from_iterable(samples.image_tokens)], np.int32)
        columns.append(list_array(offsets, binary_array(digests, IMAGE_DIGEST_BYTES)))
        columns.append(list_array(offsets, to_arrow(counts)))
    columns.append(source_array(len(samples.records), 0, [label]))
    columns.append(to_arrow(first + np.array(samples.records, dtype=np.int64)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
