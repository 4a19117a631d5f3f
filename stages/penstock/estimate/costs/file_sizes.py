"""Estimate samples and tokens of source files that are not prepared yet.

From file sizes and the first records of each source; exact for Megatron files, from their index. No
tokenizer is loaded.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from penstock.core.cache.stage import Source
from penstock.core.errors import PenstockError
from penstock.core.sources.local_files import detect_compression, detect_file_kind
from penstock.core.sources.megatron_files import DATA, INDEX

SAMPLE_BYTES = 1 << 18
"""Bytes read from each source."""

RECORD_START = re.compile(r"[^ \t\r\n,\[]")
"""What is neither the opening bracket of an array nor a separator of records."""

MESSAGE_KEYS = {"role", "from"}

MARKERS = "<|start|>\n<|end|>\n"
"""What a chat template has around a message."""

ASSUMED_SAMPLE_TOKENS = 512
"""Assumed tokens per sample if records cannot be read."""


@dataclass(frozen=True)
class FileSizes:
    """Estimates for all sources together."""

    tokens: int
    samples: int
    longest: int
    """Tokens of the longest record read, rounded up to a power of two."""
    longest_record: int = 0
    """The same without rounding."""


def estimate_samples(
    sources: Sequence[Source], vocab_size: int, limits: Sequence[int | None] = ()
) -> FileSizes | None:
    """Estimate samples and tokens of `sources`, of each at most its limit of samples; None if there
    are no tokens, or a file size is unknown."""
    per_token = bytes_per_token(vocab_size)
    tokens = samples = 0.0
    longest = 1.0
    for source, limit in zip_longest(sources, limits[: len(sources)]):
        files: Any = source.pin.get("files")
        if not isinstance(files, list) or not all(
            isinstance(file, Mapping) and isinstance(file.get("bytes"), int) for file in files
        ):
            return None
        source_tokens, source_samples, source_longest = _estimate_source(source, files, per_token)
        used = min(source_samples, limit or source_samples)
        tokens += source_tokens * used / source_samples if source_samples else 0
        samples += used
        longest = max(longest, source_longest)
    if not tokens:
        return None
    power = 1 << (math.ceil(longest) - 1).bit_length()
    return FileSizes(math.ceil(tokens), math.ceil(samples), power, math.ceil(longest))


def _estimate_source(
    source: Source, files: Sequence[Mapping[str, Any]], per_token: float
) -> tuple[float, float, float]:
    """Tokens, samples, and tokens of the longest sample of one source."""
    if source.paths and any(path.suffix == INDEX for path in source.paths):
        documents = _document_tokens(source)
        return sum(documents), len(documents), max(documents, default=0)
    size = sum(file["bytes"] for file in files)
    records = _first_records(source.paths[0]) if source.paths else []
    if not records:
        tokens = size / per_token
        return tokens, tokens / ASSUMED_SAMPLE_TOKENS, ASSUMED_SAMPLE_TOKENS
    times = size / records[-1][0]
    text_bytes = [num_bytes for _, num_bytes in records]
    tokens = times * sum(text_bytes) / per_token
    return tokens, times * len(records), max(text_bytes) / per_token


def bytes_per_token(vocab_size: int) -> float:
    """Bytes of English text per token, by vocabulary size: 1 for a byte vocabulary, 4.1 at 32,000,
    at most 4.5. A linear fit in log2 of the vocabulary size to measured values."""
    return min(4.5, max(1.0, 0.45 * math.log2(max(2, vocab_size)) - 2.6))


def _document_tokens(source: Source) -> list[int]:
    """Tokens of each document of Megatron files, from their index files.

    Damaged indexes are skipped: the prepare stage reports them with a better message.
    """
    # Import here: only Megatron data needs NumPy.
    from penstock.prepare.readers.decompress import SourceFile  # noqa: PLC0415
    from penstock.prepare.readers.megatron import read_index  # noqa: PLC0415

    lengths: list[int] = []
    for path in source.paths or ():
        if path.suffix != INDEX:
            continue
        data = path.with_suffix(DATA)
        try:
            index = read_index(SourceFile(path.name, path, data_file=SourceFile(data.name, data)))
        except (PenstockError, OSError):
            continue
        lengths += (index.document_bytes() // index.dtype.itemsize).tolist()
    return lengths


Records = Iterator[tuple[int, int]]
"""(end offset in bytes, bytes of text) of each record."""


def _first_records(path: Path) -> list[tuple[int, int]]:
    """The `Records` at the start of a text file (JSON, CSV, plain text).

    None of other files, nor if the first record is longer than `SAMPLE_BYTES`.
    """
    kind = detect_file_kind(path.name)
    if kind not in ("json", "csv", "text") or detect_compression(path.name):
        return []
    try:
        with path.open("rb") as file:
            raw = file.read(SAMPLE_BYTES)
    except OSError:
        return []
    # The last line of what was read is cut off, unless the file ends there.
    lines = raw if len(raw) < SAMPLE_BYTES else raw[: raw.rfind(b"\n") + 1]
    read = {"json": _json_records, "csv": _csv_records, "text": _line_records}[kind]
    return list(read(lines.decode("utf-8-sig", "replace")))


def _json_records(text: str) -> Records:
    decoder, size, position = json.JSONDecoder(), 0, 0
    while start := RECORD_START.search(text, position):
        try:
            value, end = decoder.raw_decode(text, start.start())
        except ValueError:
            return
        size += len(text[position:end].encode())
        position = end
        yield size, sum(map(_num_bytes, _strings(value)))


def _csv_records(text: str) -> Records:
    size = 0
    for number, row in enumerate(csv.reader(io.StringIO(text, newline=""))):
        size += sum(map(_num_bytes, row)) + len(row)
        # The first row names the columns.
        if number:
            yield size, sum(map(_num_bytes, row))


def _line_records(text: str) -> Records:
    size = 0
    for line in text.splitlines(keepends=True):
        size += _num_bytes(line)
        yield size, _num_bytes(line.rstrip())


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if MESSAGE_KEYS & value.keys():
            yield MARKERS
        for child in value.values():
            yield from _strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)
