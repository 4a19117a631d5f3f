"""Records out of files, the hub and the built-in data sets, one at a time.

A record that cannot be read is yielded with its fault, so that the caller may count it; a file that
cannot be read on raises StageError.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DownloadMode, load_dataset
from datasets.exceptions import DatasetsError

from penstock.core.errors import CapabilityError, StageError
from penstock.core.local_files import KINDS
from penstock.prepare.builtin import generate
from penstock.prepare.faults import BadRow, kind_of

BATCH = 1000
"""Records read from a columnar file at once."""

CHUNK = 1 << 20
"""Characters read from a JSON document at once."""

KIND_OF_SUFFIX = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}


@dataclass(frozen=True)
class Record:
    """A JSON object, or the fault that hides it; `line` counts from 1 (rows where no lines are)."""

    file: str
    line: int
    value: dict[str, Any] | BadRow


def read_file(path: Path, name: str, ds_type: str | None) -> Iterator[Record]:
    """The records of a file that people know as `name`. Raises StageError where it breaks off."""
    if not path.stat().st_size:
        raise StageError(f"{name} is empty.\n  Remove it from data.datasets, or fill it.")
    yield from _READERS[ds_type or KIND_OF_SUFFIX[path.suffix]](path, name)


def count_records(path: Path, name: str, ds_type: str | None) -> int:
    """How many records `read_file` yields."""
    kind = ds_type or KIND_OF_SUFFIX[path.suffix]
    if kind == "json" and _is_lines(path):
        with path.open("rb") as stream:
            return sum(1 for line in stream if line.strip())
    return sum(1 for _ in read_file(path, name, ds_type))


def read_builtin(name: str) -> Iterator[Record]:
    """The records of a built-in data set."""
    for number, value in enumerate(generate(name), start=1):
        yield Record(name, number, value)


def open_hub(
    repo: str, commit: str, name: str | None, split: str, data_files: Sequence[str] | None
) -> Dataset:
    """A hub data set at a commit, downloaded once and mapped from the cache.

    Raises CapabilityError when it cannot be fetched.
    """
    try:
        return load_dataset(
            repo,
            name=name,
            revision=commit,
            split=split,
            data_files=list(data_files) if data_files else None,
            download_mode=DownloadMode.REUSE_DATASET_IF_EXISTS,
        )
    except ValueError as error:
        raise StageError(
            f"{repo} at {commit[:12]} cannot be loaded: {error}\n"
            "  Set name, split and data_files of the data set to what it has."
        ) from error
    except (OSError, RuntimeError, DatasetsError) as error:
        raise CapabilityError(
            f"{repo} at {commit[:12]} cannot be fetched from the hub: {error}\n"
            "  Go online or log in (hf auth login), or give a local path."
        ) from error


def read_hub(data: Dataset, repo: str) -> Iterator[Record]:
    """The records of a hub data set; the repository stands in for the file."""
    for start in range(0, len(data), BATCH):
        columns = data[start : start + BATCH]
        for offset, values in enumerate(zip(*columns.values(), strict=True)):
            yield Record(repo, start + offset + 1, dict(zip(columns, values, strict=True)))


def _lines(path: Path, name: str) -> Iterator[Record]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Record(name, number, _parsed(line))


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        value = json.loads(line)
    except RecursionError:
        return BadRow("invalid_json", "not JSON: nested too deeply")
    except UnicodeDecodeError as error:
        return BadRow("invalid_json", f"not UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRow("invalid_json", f"not JSON: {error.msg} at column {error.colno}")
    return _object(value)


def _object(value: Any) -> dict[str, Any] | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow("wrong_type", f"the record is {kind_of(value)} where an object is meant")


def _json(path: Path, name: str) -> Iterator[Record]:
    return _lines(path, name) if _is_lines(path) else _document(path, name)


def _is_lines(path: Path) -> bool:
    """Whether a JSON file is lines of JSON, whatever it is called."""
    if path.suffix == ".jsonl":
        return True
    with path.open("rb") as stream:
        first = next((line for line in stream if line.strip()), b"")
    return first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") and isinstance(_parsed(first), dict)


def _document(path: Path, name: str) -> Iterator[Record]:
    """An array of objects, or objects one after another, never whole in memory."""
    with path.open(encoding="utf-8-sig") as stream:
        reader = _JsonReader(stream, name)
        is_array = reader.peek() == "["
        if is_array:
            reader.skip()
        while (character := reader.peek()) and not (is_array and character == "]"):
            if character == ",":
                reader.skip()
                continue
            line = reader.line
            yield Record(name, line, _object(reader.value()))
        if is_array and not character:
            raise StageError(
                f"{name} breaks off at line {reader.line}: its array is never closed.\n"
                "  Write the file again, whole."
            )


class _JsonReader:
    """JSON values from a text stream, read a chunk at a time."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self.line = 1

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if not character.isspace():
                    return character
                self.skip()
            if not self._refill():
                return ""

    def skip(self) -> None:
        """Pass over one character."""
        self.line += self._text[self._at] == "\n"
        self._at += 1

    def value(self) -> Any:
        """The next value. Raises StageError where the text is not JSON."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if self._refill():
                    continue
                line, why = self.line, "nested too deeply"
                if isinstance(error, json.JSONDecodeError):
                    line += self._text.count("\n", self._at, error.pos)
                    why = error.msg
                raise StageError(
                    f"{self._name}:{line}: not JSON: {why}.\n"
                    "  Correct it there, or write the records as lines of JSON (.jsonl), where "
                    "one fault spoils one record."
                ) from error
            self.line += self._text.count("\n", self._at, end)
            self._at = end
            return value

    def _refill(self) -> bool:
        kept = self._text[self._at :]
        try:
            more = self._stream.read(max(CHUNK, len(kept)))
        except UnicodeDecodeError as error:
            raise StageError(
                f"{self._name} is not UTF-8 after line {self.line}: {error.reason}.\n"
                "  Write the file in UTF-8."
            ) from error
        self._text, self._at = kept + more, 0
        return bool(more)


def _csv(path: Path, name: str) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than one long document
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader)
            for fields in reader:
                if not fields:
                    continue
                if len(fields) == len(header):
                    yield Record(name, reader.line_num, dict(zip(header, fields, strict=True)))
                else:
                    why = f"{len(fields)} fields where the header has {len(header)}"
                    yield Record(name, reader.line_num, BadRow("wrong_type", why))
        except (csv.Error, UnicodeDecodeError) as error:
            raise StageError(
                f"{name}:{reader.line_num}: not CSV: {error}.\n  Correct it there, in UTF-8."
            ) from error


def _text(path: Path, name: str) -> Iterator[Record]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield Record(name, number, {"text": line.rstrip(b"\r\n").decode()})
            except UnicodeDecodeError as error:
                fault = BadRow("bad_value", f"not UTF-8: {error.reason} at byte {error.start + 1}")
                yield Record(name, number, fault)


def _parquet(path: Path, name: str) -> Iterator[Record]:
    with _whole(name, "parquet"), pq.ParquetFile(path) as file:
        yield from _rows(file.iter_batches(batch_size=BATCH), name)


def _arrow(path: Path, name: str) -> Iterator[Record]:
    with _whole(name, "arrow"), pa.memory_map(str(path)) as stream:
        try:
            file = pa.ipc.open_file(stream)
        except pa.ArrowInvalid:
            stream.seek(0)
            yield from _rows(pa.ipc.open_stream(stream), name)
            return
        batches = (file.get_batch(index) for index in range(file.num_record_batches))
        yield from _rows(batches, name)


class _whole:  # noqa: N801 - used as a function
    """Turns Arrow's complaints about a file into ours."""

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, pa.ArrowException | OSError):
            raise StageError(
                f"{self._name} cannot be read as {self._kind}: {error}\n"
                "  It may be cut short or of another kind: write it again, or set ds_type."
            ) from error


def _rows(batches: Iterator[pa.RecordBatch], name: str) -> Iterator[Record]:
    line = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH):
            for value in batch.slice(start, BATCH).to_pylist():
                line += 1
                yield Record(name, line, value)


_READERS = {"json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow, "text": _text}
