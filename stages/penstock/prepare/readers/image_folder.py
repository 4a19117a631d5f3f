"""Metadata of an image folder (`imagefolder` of `datasets`), which names images in `file_name`."""

from posixpath import basename
from typing import Any

from penstock.prepare.readers.records import Chunk, Value

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")

COLUMNS = {
    "file_name": "image",
    "file_names": "images",
    "image_file_name": "image",
    "image_file_names": "images",
}
"""Columns with names of images, and the columns from which images are read."""


def is_metadata(name: str) -> bool:
    """Whether a file is the metadata of an image folder, by its name."""
    return basename(name) in METADATA


def with_image_columns(chunk: Chunk) -> Chunk:
    """Records with names of images as their images, unless they have a column of images."""

    def parse(items: Any) -> list[Value]:
        return [
            _with_images(value) if isinstance(value, dict) else value
            for value in inner_parse(items)
        ]

    inner_parse = chunk.parse
    return Chunk(chunk.items, chunk.positions, parse)


def _with_images(record: dict[str, Any]) -> dict[str, Any]:
    named = next((name for name in COLUMNS if record.get(name)), None)
    if named is None or any(record.get(column) for column in COLUMNS.values()):
        return record
    return {**record, COLUMNS[named]: record[named]}
