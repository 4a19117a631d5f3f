"""Metadata of an image folder (`imagefolder` of `datasets`), which names images in `file_name`."""

from posixpath import basename
from typing import Any

from penstock.prepare.bad_records import BadRecord
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
        values = chunk.parse(items)
        for index, value in enumerate(values):
            if isinstance(value, BadRecord) or any(map(value.get, COLUMNS.values())):
                continue
            if named := next(filter(value.get, COLUMNS), None):
                values[index] = {**value, COLUMNS[named]: value[named]}
        return values

    return Chunk(chunk.items, chunk.positions, parse)
