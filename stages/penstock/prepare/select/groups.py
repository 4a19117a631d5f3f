"""Groups of `data.split_by`: records with the same value in a column."""

import json
from pathlib import Path

import numpy as np

from penstock.core.errors import StageError
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.readers.read_slice import read_records
from penstock.prepare.select.ngrams import Hashes, hash_text
from penstock.prepare.slices import Slice
from penstock.rows.arrow import map_batches, to_numpy


def column_hashes(item: Slice, path: Path, column: str, token: bool | None = None) -> Hashes:
    """64-bit hashes of the values of a column, for the samples of a tokenized slice, [samples].

    Raises StageError for a record without a value.
    """
    rows = np.concatenate(
        [np.empty(0, np.int64), *(to_numpy(b.column("row"), np.int64) for b in map_batches(path))]
    )
    wanted_rows, hashes, first = set(rows.tolist()), dict[int, int](), 0
    for batch in read_records(item, token):
        for index, record in enumerate(batch.values):
            if first + index not in wanted_rows or isinstance(record, BadRecord):
                continue
            value = record.get(column)
            if value is None:
                raise StageError(
                    f"{batch.file}:{batch.line(index)}: the record has no value in {column!r} "
                    f"(data.split_by); it has {', '.join(record)}.\n"
                    "  Name a column that every record has."
                )
            # default=str: columns of Arrow may have times, decimals and bytes, which JSON has not.
            hashes[first + index] = hash_text(json.dumps(value, sort_keys=True, default=str))
        first += len(batch.values)
    return np.array([hashes[row] for row in rows.tolist()], dtype=np.uint64)
