"""Split sources into pieces that can be read independently and are identified by content.

Line-based files are split into byte ranges, Parquet into ranges of row groups, Arrow files into
ranges of record batches, hub data sets into ranges of rows or, when streamed, their shards; other
files are not split. A local byte range is identified by the digest of its lines, so appending to a
file does not change its earlier pieces.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from penstock.config.schema.dataset import MAX_RECORD_BYTES
from penstock.core.cache.digest_cache import cached_value, digest_files, is_remembered
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source
from penstock.core.errors import StageError
from penstock.core.sources.local_files import detect_file_kind
from penstock.core.sources.megatron_files import DATA, INDEX, split_range
from penstock.prepare.readers.arrow_messages import check_footer
from penstock.prepare.readers.columnar import ARROW_FILE, arrow_errors
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.documents import detect_delimiter, record_list
from penstock.prepare.readers.expansion import Expansion
from penstock.prepare.readers.file_signatures import require_text
from penstock.prepare.readers.lines import BOM, line_start, parse_line
from penstock.prepare.readers.megatron import read_index
from penstock.prepare.readers.row_groups import open_parquet

# Approximate bytes per piece: seconds of work for one process.
SLICE_BYTES = 16 << 20

ROWS = 1000
"""Hub data sets are split at multiples of this number of rows."""

FORMAT = 3
"""Increase it if the same file must be split differently."""

BLOCK = 1 << 20
# Number of threads that compute digests; hashlib releases the GIL.
THREADS = 8

Reader = Literal[
    "json_lines",
    "text_lines",
    "json_document",
    "csv",
    "tar",
    "parquet",
    "arrow_file",
    "arrow_stream",
    "megatron",
    "hub",
    "stream",
    "builtin",
]
SplitSpec = dict[str, Any]
"""A piece as plain JSON: reader, span, before, num_bytes, and lines_sha256 if known."""


@dataclass(frozen=True)
class FileSplit:
    """One piece of a file or hub data set, or a whole built-in data set."""

    reader: Reader
    name: str
    content: Mapping[str, Any]
    """Digest or pin of its content, or of the whole that `span` refers to."""
    file: SourceFile | None = None
    span: tuple[int, int] | None = None
    """[start, stop) in bytes, row groups, record batches, documents or rows; for a streamed data
    set (shard index, number of shards)."""
    records_before: int | None = 0
    """Number of lines or rows before it; None if that requires reading the file."""
    num_bytes: int = 0
    """Approximate size, for load balancing."""
    start: int = 0
    """Index of the first record that is used."""
    stop: int | None = None
    """Index after the last record that is used; None: all."""

    def as_json(self) -> dict[str, Any]:
        """Its identity, without its location."""
        return {
            "reader": self.reader,
            "name": self.name,
            "content": dict(self.content),
            "span": None if "lines_sha256" in self.content else self.span,
            "records": [self.start, self.stop],
        }


def split_source(
    source: Source,
    *,
    ds_type: str | None,
    streaming: bool,
    token: bool | None,
    split: tuple[str, str] | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> list[FileSplit]:
    """Split a source into pieces, in the order of its records.

    `split`, for Megatron files: (`splits_string`, name of the split).

    Raises StageError for a file that is empty or of another type, CapabilityError for a hub data
    set that cannot be fetched.
    """
    pin = dict(source.pin)
    if pin["kind"] == "builtin":
        return [FileSplit("builtin", str(pin["name"]), pin)]
    if pin["kind"] == "hub":
        return _split_hub(pin, streaming, token)
    files: list[SourceFile] = []
    for entry, location in zip(pin["files"], source.paths or source.urls, strict=True):
        file = SourceFile(str(entry["name"]), location, entry, max_record_bytes=max_record_bytes)
        if files and files[-1].name.endswith(INDEX) and file.name.endswith(DATA):
            files[-1] = replace(files[-1], data_file=file)
        else:
            files.append(file)
    pieces = [piece for file in files for piece in _split_file(file, ds_type)]
    return _select_documents(pieces, source, split) if split else pieces


def _select_documents(
    pieces: Sequence[FileSplit], source: Source, split: tuple[str, str]
) -> list[FileSplit]:
    """The documents of one split; each file is split separately. Raises StageError if there are
    none."""
    splits: list[FileSplit] = []
    last = {piece.name: piece.span[1] for piece in pieces if piece.span}
    for piece in pieces:
        if piece.reader != "megatron" or not piece.span:
            raise StageError(
                f"{source.pin['label']} is not Megatron data, so splits_string"
                f" ({split[0]}) has no documents to split.\n  Remove splits_string."
            )
        document_range = split_range(last[piece.name], *split)
        first = max(piece.span[0], document_range.start)
        end = min(piece.span[1], document_range.stop)
        if first < end:
            share = (end - first) / (piece.span[1] - piece.span[0])
            size = int(piece.num_bytes * share)
            splits.append(replace(piece, span=(first, end), records_before=first, num_bytes=size))
    if not splits:
        raise StageError(
            f"{source.pin['label']} has {sum(last.values()):,} documents, of which splits_string"
            f" ({split[0]}) gives none to {split[1]}.\n"
            "  Write shares that give it some, or leave the data set out."
        )
    return splits


def require_unchanged(files: Iterable[SourceFile | None]) -> None:
    """Raise StageError if a local file, or its data file, is no longer what it was when it was
    pinned."""
    for file in {file.name: file for file in files if file}.values():
        digest = file.pinned.get("sha256")
        if isinstance(file.location, Path) and digest and digest_files([file.location]) != [digest]:
            raise _changed(file)
        require_unchanged([file.data_file])


def require_unchanged_pieces(pieces: Iterable[FileSplit]) -> None:
    """Raise StageError if the files of the pieces have changed. Where digests of files are not
    remembered, only the lines of the pieces are read."""
    files: list[SourceFile | None] = []
    for piece in pieces:
        file, lines = piece.file, piece.content.get("lines_sha256")
        if file and lines and piece.span and not is_remembered(Path(file.location)):
            if _digest_and_count_lines(Path(file.location), *piece.span)[0] != lines:
                raise _changed(file)
        else:
            files.append(file)
    require_unchanged(files)


def _changed(file: SourceFile) -> StageError:
    return StageError(
        f"{file.name} has changed since this run started.\n"
        "  Run again when no process writes to it."
    )


def _split_file(file: SourceFile, ds_type: str | None) -> list[FileSplit]:
    if file.pinned.get("bytes") == 0:
        raise StageError(f"{file.name} is empty.\n  Remove it from data.datasets, or fill it.")
    content = {key: value for key, value in file.pinned.items() if key != "name"}
    if file.data_file:
        content["data"] = {k: v for k, v in file.data_file.pinned.items() if k != "name"}
    kind = ds_type or detect_file_kind(file.name) or ""
    cache_key = digest_json([FORMAT, SLICE_BYTES, kind, file.name, content])

    def cuts() -> list[SplitSpec]:
        pieces = list(_SPLITTERS[kind](file))
        # Before they are cached: under the digest of this content, cuts of another would stay.
        require_unchanged([file, file.data_file])
        return pieces

    # Its reader is replaced by that of each cut.
    whole_file = FileSplit("csv", file.name, content, file)
    return [_build_split(whole_file, cut) for cut in cached_value(cache_key, cuts)]


def _build_split(whole_file: FileSplit, cut: SplitSpec) -> FileSplit:
    content = whole_file.content
    if digest := cut.get("lines_sha256"):
        # Error examples contain line numbers, so the first line number is part of the identity.
        content = {"lines_sha256": digest, "line": cut["before"]}
    if delimiter := cut.get("delimiter"):
        content = {**content, "delimiter": delimiter}
    return replace(
        whole_file,
        reader=cut["reader"],
        content=content,
        span=tuple(cut["span"]) if cut["span"] else None,
        records_before=cut["before"],
        num_bytes=cut["num_bytes"],
    )


def _spec(
    reader: Reader, span: tuple[int, int] | None, before: int | None, num_bytes: int, **more: str
) -> SplitSpec:
    return {"reader": reader, "span": span, "before": before, "num_bytes": num_bytes, **more}


def _whole_file(reader: Reader, file: SourceFile, **more: str) -> Iterator[SplitSpec]:
    yield _spec(reader, None, 0, file.pinned.get("bytes") or SLICE_BYTES, **more)


def _split_lines(reader: Reader, file: SourceFile) -> Iterator[SplitSpec]:
    size = file.pinned.get("bytes")
    if file.compression or size is None:
        yield from _whole_file(reader, file)
    elif isinstance(file.location, Path):
        yield from _split_local_lines(reader, file.location, size)
    else:
        # Not at line starts: to find these, and to digest the lines, would fetch the file to plan a
        # run.
        for start in range(0, size, SLICE_BYTES):
            stop = min(start + SLICE_BYTES, size)
            yield _spec(reader, (start, stop), None if start else 0, stop - start)


def _split_local_lines(reader: Reader, path: Path, size: int) -> Iterator[SplitSpec]:
    with path.open("rb") as stream:
        bounds = [*(line_start(stream, index) for index in range(0, size, SLICE_BYTES)), size]
    # A line that is longer than a slice gives empty spans.
    spans = [(start, stop) for start, stop in pairwise(bounds) if start < stop]
    with ThreadPoolExecutor(min(THREADS, len(spans))) as pool:
        read = list(pool.map(lambda span: _digest_and_count_lines(path, *span), spans))
    lines_before = accumulate((lines for _, lines in read), initial=0)
    # strict=False: the sums have one more, the total.
    for span, (digest, _), before in zip(spans, read, lines_before, strict=False):
        yield _spec(reader, span, before, span[1] - span[0], lines_sha256=digest)


def _digest_and_count_lines(path: Path, start: int, stop: int) -> tuple[str, int]:
    digest, lines = hashlib.sha256(), 0
    with path.open("rb") as stream:
        stream.seek(start)
        while start < stop and (block := stream.read(min(BLOCK, stop - start))):
            digest.update(block)
            lines += block.count(b"\n")
            start += len(block)
    return digest.hexdigest(), lines


def _split_json(file: SourceFile) -> Iterator[SplitSpec]:
    require_text(file, "json")
    if _is_json_lines(file):
        return _split_lines("json_lines", file)
    return _whole_file("json_document", file)


def _is_json_lines(file: SourceFile) -> bool:
    """Whether a JSON file contains JSON lines: by its content, or by its name if the first line is
    neither an object nor a list of messages nor the start of a longer value."""
    stem = Path(file.name).stem if file.compression else file.name
    limit = file.max_record_bytes
    with file.open() as stream:
        lines = iter(lambda: stream.readline(limit + 1), b"")
        filled = (line.removeprefix(BOM).strip() for line in lines if line.strip())
        first = next(filled, b"")
        if len(first) >= limit:  # an array in one line is read piece by piece
            return stem.lower().endswith((".jsonl", ".ndjson")) and not first.startswith(b"[")
        if first.startswith(b"{") and isinstance(value := parse_line(first), dict):
            return record_list(value) is None or next(filled, b"").startswith(b"{")
        second = next(filled, b"")
        if second.startswith(b"[") and isinstance(parse_line(first), dict):
            return True
        if not stem.lower().endswith((".jsonl", ".ndjson")):
            return False
        return not _is_json_document(first, second + b"\n" + stream.read(BLOCK))


def _is_json_document(first: bytes, more: bytes) -> bool:
    """Whether a file named .jsonl is in fact an array of objects, or objects that span several
    lines or are separated by commas. `first` is its first line, `more` the text after it."""
    decoder = json.JSONDecoder()
    try:
        head = f"{first.decode()}\n{more.decode(errors='replace')}"
        if head.startswith("["):
            inner = head[1:].lstrip()
            return inner.startswith("{") and isinstance(decoder.raw_decode(inner)[0], dict)
        value, end = decoder.raw_decode(head)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and (end > len(first.decode()) or head[end] == ",")


def _split_text(file: SourceFile) -> Iterator[SplitSpec]:
    require_text(file, "text")
    return _split_lines("text_lines", file)


def _split_csv(file: SourceFile) -> Iterator[SplitSpec]:
    require_text(file, "csv")
    delimiter = detect_delimiter(file)
    # Not part of the identity for commas, so that slices of earlier versions stay valid.
    extra = {} if delimiter == "," else {"delimiter": delimiter}
    return _whole_file("csv", file, **extra)


def _split_parquet(file: SourceFile) -> Iterator[SplitSpec]:
    with arrow_errors(file, "parquet"), file.open_arrow() as (stream, _):
        footer = open_parquet(stream).metadata
        groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    start, rows, num_bytes, before = 0, 0, 0, 0
    for index, group in enumerate(groups, start=1):
        rows += group.num_rows
        # Of the columns before compression: how well they compress says nothing about the work.
        num_bytes += group.total_byte_size
        if num_bytes >= SLICE_BYTES or index == len(groups):
            yield _spec("parquet", (start, index), before, num_bytes)
            start, before, rows, num_bytes = index, before + rows, 0, 0


def _split_arrow(file: SourceFile) -> Iterator[SplitSpec]:
    with file.open() as stream:
        is_stream = stream.read(len(ARROW_FILE)) != ARROW_FILE
    if is_stream:
        yield from _whole_file("arrow_stream", file)
        return
    with arrow_errors(file, "arrow"), file.open_arrow() as (source, raw):
        check_footer(raw, Expansion(file.name, source.size()))
        batches = pa.ipc.open_file(source).num_record_batches
    size = file.pinned.get("bytes") or 0
    count = max(1, min(batches, -(-size // SLICE_BYTES)))
    for number in range(count):
        span = (batches * number // count, batches * (number + 1) // count)
        # None: the footer of an Arrow file does not have the numbers of rows.
        yield _spec("arrow_file", span, None if number else 0, size // count)


def _split_megatron(file: SourceFile) -> Iterator[SplitSpec]:
    sizes = read_index(file).document_bytes()
    numbers = (np.cumsum(sizes) - sizes) // SLICE_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(sizes)]
    for first, last in pairwise(cuts):
        if first < last:
            yield _spec("megatron", (first, last), first, int(sizes[first:last].sum()))


_SPLITTERS: dict[str, Callable[[SourceFile], Iterator[SplitSpec]]] = {
    "json": _split_json,
    "text": _split_text,
    "csv": _split_csv,
    "parquet": _split_parquet,
    "arrow": _split_arrow,
    "tar": partial(_whole_file, "tar"),
    "megatron": _split_megatron,
}


def _split_hub(pin: dict[str, Any], streaming: bool, token: bool | None) -> list[FileSplit]:
    repo = str(pin["repo"])
    if streaming:

        def count_shards() -> int:
            # `datasets` takes a second to import.
            from penstock.prepare.readers.hub import open_stream  # noqa: PLC0415

            return open_stream(pin, token).num_shards

        shards = cached_value(digest_json([FORMAT, "shards", pin]), count_shards)
        return [
            FileSplit("stream", repo, pin, span=(index, shards), num_bytes=SLICE_BYTES)
            for index in range(shards)
        ]
    cache_key = digest_json([FORMAT, SLICE_BYTES, "rows", pin])
    return [
        FileSplit("hub", repo, pin, span=(start, stop), records_before=start, num_bytes=num_bytes)
        for start, stop, num_bytes in cached_value(cache_key, lambda: _split_hub_rows(pin, token))
    ]


def _split_hub_rows(pin: dict[str, Any], token: bool | None) -> list[list[int]]:
    from penstock.prepare.readers.hub import open_hub  # noqa: PLC0415 - as above

    data = open_hub(pin, token)
    rows, num_bytes = len(data), data.data.nbytes
    rows_per_slice = max(ROWS, SLICE_BYTES * rows // max(1, num_bytes) // ROWS * ROWS)
    bounds = [
        (start, min(start + rows_per_slice, rows)) for start in range(0, rows, rows_per_slice)
    ]
    return [[start, stop, num_bytes * (stop - start) // rows] for start, stop in bounds]
