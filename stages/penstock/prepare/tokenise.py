"""One slice: records in, samples out, as an Arrow file beside a tally of what became of them."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import StageError
from penstock.core.files import publishing, read_json, write_json
from penstock.prepare.faults import BadRow, Tally, column
from penstock.prepare.formats.sample import Encoder, Sample
from penstock.prepare.read import BATCH, Record, open_hub, read_builtin, read_file, read_hub
from penstock.prepare.slices import Piece, Slice
from penstock.rows.schema import PREPARED


def tokenise(item: Slice, encode: Encoder, target: Path) -> Tally:
    """Write the slice to `target`, then its tally beside it; together they mark it finished.

    All records are written in the order of the source, but for those that are left out. `row` is
    the place of the record in the slice, left-out records counted. Raises StageError when a file
    breaks off or holds nothing.
    """
    tally = Tally()
    with publishing(target) as part:
        with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, PREPARED) as writer:
            records = _records(item)
            while batch := list(islice(records, BATCH)):
                writer.write_batch(_encoded(item, encode, batch, tally))
        if not tally.records and any(piece.stop is None for piece in item.pieces):
            raise StageError(
                f"{item.pieces[0].name} (of {item.label}) holds no records.\n"
                "  Remove it from data.datasets, or fill it."
            )
        write_json(tally_of(target), tally.as_json())
    return tally


def tally_of(target: Path) -> Path:
    """Where the tally of the slice at `target` lies."""
    return target.with_suffix(".json")


def finished(target: Path) -> Tally | None:
    """The tally of a slice that an earlier attempt has finished."""
    if not target.is_file():
        return None
    return Tally.of_json(read_json(tally_of(target)))


def _records(item: Slice) -> Iterator[Record]:
    for piece in item.pieces:
        yield from islice(_open(piece, item.settings.ds_type), piece.start, piece.stop)


def _open(piece: Piece, ds_type: str | None) -> Iterator[Record]:
    if piece.path:
        return read_file(piece.path, piece.name, ds_type)
    if piece.kind == "builtin":
        return read_builtin(piece.name)
    pin = piece.pin
    data = open_hub(pin["repo"], pin["commit"], pin["name"], pin["split"], pin["data_files"])
    return read_hub(data, piece.name)


def _encoded(item: Slice, encode: Encoder, batch: list[Record], tally: Tally) -> pa.RecordBatch:
    values = [_selected(record.value, item.columns) for record in batch]
    encoded = iter(encode([value for value in values if not isinstance(value, BadRow)]))
    rows: list[int] = []
    samples: list[Sample] = []
    for record, value in zip(batch, values, strict=True):
        row = tally.records
        tally.records += 1
        sample = value if isinstance(value, BadRow) else next(encoded)
        kept = _kept(sample, item.settings.max_seq_len, tally)
        if isinstance(kept, BadRow):
            tally.leave_out(record.file, record.line, kept)
        else:
            rows.append(row)
            samples.append(kept)
    tally.rows += len(samples)
    return _batch(samples, rows, item.label)


def _selected(
    value: dict[str, Any] | BadRow, columns: tuple[str, ...] | None
) -> dict[str, Any] | BadRow:
    if columns is None or isinstance(value, BadRow):
        return value
    try:
        return {name: column(value, name) for name in columns}
    except BadRow as fault:
        return fault


def _kept(sample: Sample | BadRow, max_tokens: int | None, tally: Tally) -> Sample | BadRow:
    if isinstance(sample, BadRow):
        return sample
    length = len(sample.input_ids)
    if not length:
        return BadRow("empty", "it has no tokens")
    if max_tokens and length > max_tokens:
        sample = sample.cut(max_tokens)
        if not sample.is_trained:
            why = f"nothing to train in its first {max_tokens} of {length} tokens (max_seq_len)"
            return BadRow("no_trained_tokens", why)
        tally.truncated += 1
    if not sample.is_trained:
        return BadRow("no_trained_tokens", f"none of its {length} tokens is trained")
    return sample


def _batch(samples: list[Sample], rows: list[int], label: str) -> pa.RecordBatch:
    ends = np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int32)
    offsets = pa.array(ends, pa.int32())
    empty = [np.empty(0, dtype=np.int32)]
    ids = np.concatenate([sample.input_ids for sample in samples] or empty)
    labels = np.concatenate([sample.labels for sample in samples] or empty)
    sources = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(len(samples), dtype=np.int32)), pa.array([label], pa.string())
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.ListArray.from_arrays(offsets, pa.array(ids)),
            pa.ListArray.from_arrays(offsets, pa.array(labels)),
            sources,
            pa.array(rows, pa.int64()),
        ],
        schema=PREPARED,
    )
