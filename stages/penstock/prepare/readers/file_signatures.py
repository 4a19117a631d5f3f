"""Detect files of an unexpected type by their first bytes, before records are read."""

import codecs
from pathlib import Path
from typing import Literal

from penstock.core.errors import StageError
from penstock.prepare.readers.decompress import SourceFile

HEAD_BYTES = 4096
"""Number of bytes that are inspected."""

BINARY_SIGNATURES = {
    b"PAR1": "parquet.\n  Write ds_type: parquet, or rename it to .parquet.",
    b"ARROW1": "an Arrow file.\n  Write ds_type: arrow, or rename it to .arrow.",
    b"\x1f\x8b": "compressed by gzip.\n  Rename it to {name}.gz.",
    b"BZh": "compressed by bzip2.\n  Rename it to {name}.bz2.",
    b"\xfd7zXZ": "compressed by xz.\n  Rename it to {name}.xz.",
    b"\x28\xb5\x2f\xfd": "compressed by zstd.\n  Rename it to {name}.zst.",
    b"PK\x03\x04": "a zip archive, as spreadsheets are.\n  Unpack it, or save the table as CSV.",
    b"%PDF": "a PDF.\n  Save its text as .txt or as JSON lines.",
}
"""Magic bytes of files that are not text, with the rest of the error message."""

HTML_PREFIXES = ("<!doctype", "<html", "<?xml")

UTF16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE

Kind = Literal["json", "csv", "text"]


def require_text(file: SourceFile, kind: Kind) -> None:
    """Raise StageError for a file that cannot be read as text of this kind."""
    with file.open() as stream:
        head = stream.read(HEAD_BYTES)
    for beginning, format_name in BINARY_SIGNATURES.items():
        if head.startswith(beginning):
            raise StageError(f"{file.name} is {format_name.format(name=file.name)}")
    _require_utf8(file.name, head)
    if kind != "text":
        _require_records(file.name, kind, head.removeprefix(codecs.BOM_UTF8).lstrip())


def _require_utf8(name: str, head: bytes) -> None:
    # The mark of UTF-32 begins with that of UTF-16.
    marks = {"UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-16": UTF16_MARKS}
    encoding = next((kind for kind, mark in marks.items() if head.startswith(mark)), None)
    # Without a mark: of ASCII characters, every second byte of UTF-16 is zero.
    if encoding or head[:2].count(0) or head.count(0) > len(head) // 4:
        raise StageError(
            f"{name} is {encoding or 'UTF-16 or UTF-32 text, or no text'}, and "
            "text is read as UTF-8.\n"
            f"  Save it as UTF-8, for example: iconv -f {encoding or 'UTF-16'} -t UTF-8 {name} > "
            f"utf8_{Path(name).name}"
        )


def _require_records(name: str, kind: Kind, head: bytes) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise StageError(f"{name} is a Git LFS pointer.\n  Fetch the file with git lfs pull.")
    if head[:9].decode(errors="replace").lower().startswith(HTML_PREFIXES):
        raise StageError(
            f"{name} is a web page, not data.\n  Download the file itself (its raw URL)."
        )
    if kind == "csv" and head.startswith((b'{"', b'[{"')):
        raise StageError(
            f"{name} contains JSON, but is read as CSV.\n"
            "  Write ds_type: json, or rename it to .jsonl."
        )
    if kind == "json" and head[:1].isalpha() and not any(bracket in head for bracket in b"{["):
        first = head.partition(b"\n")[0][:40].decode(errors="replace").strip()
        raise StageError(
            f"{name} is not JSON: it starts with {first!r}.\n"
            "  Write ds_type: csv or text, or rename it to .csv or .txt; a record in JSON is an "
            'object such as {"text": "…"}.'
        )
