"""Read Parquet files by row groups, Arrow files by record batches, and whole Arrow streams."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.errors import StageError
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.records import BATCH, BATCH_BYTES, Chunk, Value

ARROW_FILE = b"ARROW1"
"""Magic bytes of an Arrow file; an Arrow stream has none."""


def parquet(source: SourceFile, span: tuple[int, int] | None) -> Iterator[Chunk]:
    """The rows of the row groups `span` (all: None)."""
    with (
        arrow_errors(source, "parquet"),
        source.open_arrow() as stream,
        pq.ParquetFile(stream, **_buffer_options(source)) as file,
    ):
        groups = range(*(span or (0, file.metadata.num_row_groups)))
        row = 1
        for group in groups:
            place = f"row group {group + 1:,}"
            metadata = file.metadata.row_group(group)
            at_once = _rows_per_chunk(metadata.total_byte_size, metadata.num_rows)
            for batch in file.iter_batches(batch_size=at_once, row_groups=[group]):
                _validate(batch, source, place)
                yield Chunk(batch, range(row, row + batch.num_rows), _to_records)
                row += batch.num_rows


def arrow_file(source: SourceFile, span: tuple[int, int] | None) -> Iterator[Chunk]:
    """The rows of the record batches `span` (all: None) of an Arrow IPC file."""
    with arrow_errors(source, "arrow"), source.open_arrow() as stream:
        file = pa.ipc.open_file(stream)
        indices = range(*(span or (0, file.num_record_batches)))
        yield from _iter_chunks(source, ((i + 1, file.get_batch(i)) for i in indices))


def arrow_stream(source: SourceFile) -> Iterator[Chunk]:
    """The rows of an Arrow IPC stream."""
    with arrow_errors(source, "arrow"), source.open_arrow() as stream:
        yield from _iter_chunks(source, enumerate(pa.ipc.open_stream(stream), start=1))


def _buffer_options(source: SourceFile) -> dict[str, Any]:
    """Read local columns page by page; remote ones at once, for fewer requests."""
    is_local = isinstance(source.location, Path)
    return {"buffer_size": 1 << 20, "pre_buffer": False} if is_local else {}


def _iter_chunks(
    source: SourceFile, batches: Iterable[tuple[int, pa.RecordBatch]]
) -> Iterator[Chunk]:
    row = 1
    for number, batch in batches:
        _validate(batch, source, f"record batch {number:,}")
        at_once = _rows_per_chunk(batch.nbytes, batch.num_rows)
        for start in range(0, batch.num_rows, at_once):
            part = batch.slice(start, at_once)
            yield Chunk(part, range(row + start, row + start + part.num_rows), _to_records)
        row += batch.num_rows


def _validate(batch: pa.RecordBatch, source: SourceFile, place: str) -> None:
    """Raise StageError unless all offsets, indices and texts are valid: native code that reads them
    does not look."""
    try:
        batch.validate(full=True)
    except (pa.ArrowException, UnicodeError) as error:
        raise StageError(
            f"{source.name} is damaged in {place}: {error}\n  Write the file again."
        ) from error


def _rows_per_chunk(num_bytes: int, num_rows: int) -> int:
    return max(1, min(BATCH, BATCH_BYTES * num_rows // max(1, num_bytes)))


def _to_records(batch: pa.RecordBatch) -> list[Value]:
    rows: list[dict[str, Any]] = batch.to_pylist()
    padded = [field.name for field in batch.schema if _has_structs(field.type)]
    for row in rows:
        for name in padded:
            row[name] = drop_nulls(row[name])
    return list[Value](rows)


def _has_structs(kind: pa.DataType) -> bool:
    """Whether a column contains structs. Other columns, such as token ids, are not traversed."""
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return pa.types.is_struct(kind) or any(_has_structs(each) for each in inner)


def drop_nulls(value: Any) -> Any:
    """Remove null members from nested objects.

    Arrow gives all structs of a column the same members and fills in nulls, so null and absent
    members cannot be distinguished; absent is far more common.
    """
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
        return {name: drop_nulls(part) for name, part in members if part is not None}
    if isinstance(value, list):
        return [drop_nulls(part) for part in cast("list[Any]", value)]
    return value


@contextmanager
def arrow_errors(source: SourceFile, kind: str) -> Generator[None]:
    """Raise StageError instead of Arrow's errors, except for a missing file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, UnicodeError, OSError) as error:
        raise StageError(
            f"{source.name} cannot be read as {kind}: {error}\n"
            "  It may be truncated or of another type: write it again, or set ds_type."
        ) from error
