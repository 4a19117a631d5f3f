"""Packed rows for benchmarks of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rows.schema import PACKED


def write_rows(
    folder: Path, *, num_rows: int, row: int, document: int | None, vocabulary: int
) -> None:
    """Full rows of `row` tokens; lengths of documents are lognormal, as those of instructions are.

    `document` is the middling length; None: one document fills a row.
    """
    drawn = draw_lengths(num_rows=num_rows, row=row, document=document)
    _write(folder, drawn, vocabulary)


def draw_lengths(*, num_rows: int, row: int, document: int | None) -> list[list[int]]:
    """Lengths of the documents of each of these rows."""
    rng = np.random.default_rng(0)
    lengths_of_rows: list[list[int]] = []
    for _ in range(num_rows):
        lengths: list[int] = []
        while (room := row - sum(lengths)) > 0:
            drawn = rng.lognormal(np.log(document), 0.8) if document else row
            lengths.append(min(room, max(2, int(drawn))))
        lengths_of_rows.append(lengths)
    return lengths_of_rows


def write_documents(
    folder: Path, *, num_rows: int, documents: Sequence[int], vocabulary: int
) -> None:
    """Rows of documents of these lengths."""
    _write(folder, [list(documents)] * num_rows, vocabulary)


def write_ids(folder: Path, ids_of_rows: Sequence[Sequence[int]]) -> None:
    """These tokens, each row one document."""
    _store(folder, [np.array(ids) for ids in ids_of_rows], [[len(ids)] for ids in ids_of_rows])


def _write(folder: Path, lengths_of_rows: Sequence[Sequence[int]], vocabulary: int) -> None:
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, vocabulary, size=sum(lengths)) for lengths in lengths_of_rows]
    _store(folder, ids, lengths_of_rows)


def _store(
    folder: Path, ids_of_rows: Sequence[np.ndarray], lengths_of_rows: Sequence[Sequence[int]]
) -> None:
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "lengths": []}
    for ids, lengths in zip(ids_of_rows, lengths_of_rows, strict=True):
        labels = np.roll(ids, -1)
        labels[np.cumsum(lengths) - 1] = -100
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
        rows["lengths"].append(list(lengths))
    train = folder / "data" / "train"
    train.mkdir(parents=True)
    with pa.ipc.new_file(str(train / "rows-00000-of-00001.arrow"), PACKED) as writer:
        writer.write_table(pa.table(rows, schema=PACKED))
