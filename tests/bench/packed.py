"""Packed rows for benchmarks of training."""

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
    rng = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "lengths": []}
    for _ in range(num_rows):
        lengths: list[int] = []
        while (room := row - sum(lengths)) > 0:
            drawn = rng.lognormal(np.log(document), 0.8) if document else row
            lengths.append(min(room, max(2, int(drawn))))
        ids = rng.integers(0, vocabulary, size=row)
        labels = np.roll(ids, -1)
        labels[np.cumsum(lengths) - 1] = -100
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
        rows["lengths"].append(lengths)
    train = folder / "data" / "train"
    train.mkdir(parents=True)
    with pa.ipc.new_file(str(train / "rows-00000-of-00001.arrow"), PACKED) as writer:
        writer.write_table(pa.table(rows, schema=PACKED))
