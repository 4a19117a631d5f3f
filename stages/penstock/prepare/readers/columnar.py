"""Read Parquet files by row groups, Arrow files by record batches, and whole Arrow streams."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa

from penstock.core.errors import StageError
from penstock.prepare.readers.arrow_messages import (
    check_footer,
    check_message,
    iter_record_batches,
)
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.expansion import Expansion
from penstock.prepare.readers.parquet_pages import PageError, read_checked_codecs
from penstock.prepare.readers.records import BATCH, BATCH_BYTES, Chunk, Value
from penstock.prepare.readers.row_groups import BATCH_MEMORY, open_parquet, plan_row_group
from penstock.prepare.readers.row_sizes import ROW_BYTES, batch_sizes

# Magic bytes of an Arrow file; an Arrow stream has none.
ARROW_FILE = b"ARROW1"


def parquet(source: SourceFile, span: tuple[int, int] | None) -> Iterator[Chunk]:
    """The rows of the row groups `span` (all: None)."""
    with arrow_errors(source, "parquet"), source.open_arrow() as (stream, raw):
        file = open_parquet(stream)
        codecs = read_checked_codecs(raw, file)
        expansion, row = Expansion(source.name, stream.size()), 1
        for group in range(*(span or (0, file.metadata.num_row_groups))):
            plan = plan_row_group(file, group, raw, codecs[group], source, expansion)
            reader, after = file, row + plan.num_rows
            if plan.dictionaries:
                # Which columns are read as dictionaries is set for a whole reader; the footer is
                # not read again.
                reader = open_parquet(stream, plan.dictionaries, file.metadata)
            for batch in reader.iter_batches(batch_size=plan.rows_at_once, row_groups=[group]):
                yield from _iter_chunks(source, batch, plan.location, row, expansion)
                row += batch.num_rows
            if row != after:
                raise pa.ArrowInvalid(
                    f"{plan.location} has {plan.num_rows + row - after:,} rows of {plan.num_rows:,}"
                )


def arrow_file(source: SourceFile, span: tuple[int, int] | None) -> Iterator[Chunk]:
    """The rows of the record batches `span` (all: None) of an Arrow IPC file."""
    with arrow_errors(source, "arrow"), source.open_arrow() as (stream, raw):
        expansion = Expansion(source.name, stream.size())
        blocks = check_footer(raw, expansion)
        file = pa.ipc.open_file(stream)

        def batch(index: int) -> pa.RecordBatch:
            check_message(raw, blocks[index], expansion)
            return file.get_batch(index)

        indices = range(*(span or (0, file.num_record_batches)))
        yield from _iter_batches(source, ((i + 1, batch(i)) for i in indices), expansion)


def arrow_stream(source: SourceFile) -> Iterator[Chunk]:
    """The rows of an Arrow IPC stream."""
    with arrow_errors(source, "arrow"), source.open_arrow() as (stream, raw):
        expansion = Expansion(source.name, stream.size())
        checked = iter_record_batches(raw, expansion)
        # Before the reader: Arrow allocates what the schema and dictionaries in front claim as it
        # reads them.
        offset = next(checked, None)
        reader = pa.ipc.open_stream(stream)

        def iter_batches() -> Iterator[pa.RecordBatch]:
            nonlocal offset
            while offset is not None:
                yield reader.read_next_batch()
                offset = next(checked, None)

        yield from _iter_batches(source, enumerate(iter_batches(), start=1), expansion)
        # Where Arrow goes on behind the end that was checked, nothing bounds what it reads.
        if next(reader, None) is not None:
            raise pa.ArrowInvalid("there are record batches after its end")


def _iter_batches(
    source: SourceFile, batches: Iterable[tuple[int, pa.RecordBatch]], expansion: Expansion
) -> Iterator[Chunk]:
    row = 1
    for number, batch in batches:
        yield from _iter_chunks(source, batch, f"record batch {number:,}", row, expansion)
        row += batch.num_rows


def _iter_chunks(
    source: SourceFile, batch: pa.RecordBatch, location: str, row: int, expansion: Expansion
) -> Iterator[Chunk]:
    """A batch whose first row is `row` as chunks of about `BATCH_BYTES`. Raises StageError for a
    row that is too large."""
    expansion.add(batch.num_rows * ROW_BYTES)
    try:
        # Native code that reads offsets, indices and texts does not look whether they are valid.
        batch.validate(full=True)
    except (pa.ArrowException, UnicodeError) as error:
        raise StageError(
            f"{source.name} is damaged in {location}: {error}\n  Write the file again."
        ) from error
    sizes = batch_sizes(batch)
    if isinstance(sizes, int):
        largest, total = sizes, sizes * batch.num_rows
    else:
        largest, total = int(sizes.max(initial=0)), int(sizes.sum())
    if largest > source.max_record_bytes:
        number = row if isinstance(sizes, int) else row + int(sizes.argmax())
        raise source.too_large(f"row {number:,}")
    expansion.add(total - batch.num_rows * ROW_BYTES)
    usual = BATCH_BYTES * batch.num_rows // max(1, total)
    at_once = max(1, min(BATCH, usual, BATCH_MEMORY // largest))
    for start in range(0, batch.num_rows, at_once):
        part = batch.slice(start, at_once)
        yield Chunk(part, range(row + start, row + start + part.num_rows), _to_records)


def _to_records(batch: pa.RecordBatch) -> list[Value]:
    rows: list[dict[str, Any]] = batch.to_pylist()
    padded = [field.name for field in batch.schema if _has_structs(field.type)]
    for row in rows:
        for name in padded:
            row[name] = drop_nulls(row[name])
    return list[Value](rows)


def _has_structs(kind: pa.DataType) -> bool:
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return pa.types.is_struct(kind) or any(_has_structs(inner_type) for inner_type in inner)


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
    except (pa.ArrowException, PageError, UnicodeError, OSError) as error:
        raise StageError(
            f"{source.name} cannot be read as {kind}: {error}\n"
            "  It may be truncated or of another type: write it again, or set ds_type."
        ) from error
