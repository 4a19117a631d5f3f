"""Parquet files of prepared samples, for the Hub's data viewer and `datasets`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.cache.stage import Artifact
from penstock.core.cache.verify import MAX_LISTED_FILES, damaged_files
from penstock.core.errors import ArtifactError
from penstock.core.files import read_json
from penstock.rows.arrow import map_batches, with_columns
from penstock.rows.prepared import PLAN
from penstock.rows.schema import SPLITS

FILE_BYTES = 512 << 20
"""Maximum bytes of samples per parquet file before compression, in whole batches."""


@dataclass(frozen=True)
class ParquetFile:
    """A file to write: the batches of `split` that it contains, and its numbered name."""

    split: str
    name: str
    batches: tuple[pa.RecordBatch, ...]

    def write(self, target: Path) -> None:
        schema = _without_dictionaries(self.batches[0].schema)
        with pq.ParquetWriter(target, schema, compression="zstd") as writer:
            for batch in self.batches:
                writer.write_batch(batch.cast(schema))


def parquet_files(prepared: Artifact, *, file_bytes: int = FILE_BYTES) -> Iterator[ParquetFile]:
    """The samples of every split in storage order; an empty split has no file. Raises ArtifactError
    if a file differs from the manifest."""
    files = prepared.manifest["files"]
    root = prepared.path.resolve()
    outside = [
        f"{prepared.path / file['path']} lies outside of it"
        for file in files
        if not (root / file["path"]).resolve().is_relative_to(root)
    ]
    if damaged := outside or damaged_files(prepared.path, files, "changed"):
        raise ArtifactError(
            f"the prepared data in {prepared.path} has changed since it was finished; nothing was "
            "sent:\n  "
            + "\n  ".join(damaged[:MAX_LISTED_FILES])
            + "\n  Prepare the data again with --force prepare."
        )
    verified = {file["path"] for file in files}
    plan: dict[str, Any] = read_json(prepared.path / PLAN)
    for split in SPLITS:
        files = [entry["file"] for entry in plan["splits"][split]]
        for file in files:
            if file not in verified:
                raise ArtifactError(
                    f"{prepared.path} has no {file} in its manifest; nothing was sent.\n"
                    "  Prepare the data again with --force prepare."
                )
        batches = [batch for file in files for batch in map_batches(prepared.path / file)]
        # Some slices may lack the column of loss weights.
        schema = max((batch.schema for batch in batches), key=len, default=None)
        filled = [with_columns(batch, schema) for batch in batches if batch.num_rows]
        groups = list(_group_batches(filled, file_bytes))
        for number, group in enumerate(groups):
            yield ParquetFile(split, f"{split}-{number:05d}-of-{len(groups):05d}.parquet", group)


def _group_batches(
    batches: list[pa.RecordBatch], file_bytes: int
) -> Iterator[tuple[pa.RecordBatch, ...]]:
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if group and size + batch.nbytes > file_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(batch)
        size += batch.nbytes
    if group:
        yield tuple(group)


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    # Parquet has its own dictionary encoding, and `datasets` reads no dictionary types.
    return pa.schema(
        [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
    )
