"""Finished slices to `data/train` and `data/validation`; a sample lies in one of the two."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.core.errors import StageError
from penstock.core.files import publishing
from penstock.prepare.faults import Tally
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.slices import Slice
from penstock.rows.order import Indices, validation_rows
from penstock.rows.reader import map_batches
from penstock.rows.schema import PREPARED

Finished = tuple[Slice, Path, Tally]
"""A slice, where its tokenised file lies, and what became of its records."""


def publish_splits(finished: Sequence[Finished], settings: PrepareSettings, out: Path) -> None:
    """Write every slice's part of each split below `out/data`, skipping those that are there.

    A training slice keeps its file even when nothing is left in it. Raises StageError when
    validation would leave nothing to train on.
    """
    total = sum(tally.rows for item, _, tally in finished if item.role == "train")
    chosen = validation_rows(total, settings.val_set_size, settings.seed)
    if len(chosen) >= total:
        raise StageError(
            f"Validation takes {len(chosen)} samples, and there are {total} in all.\n"
            f"  Set data.val_set_size ({settings.val_set_size}) lower."
        )
    start = 0
    for item, staged, tally in finished:
        if item.role == "validation":
            _whole(staged, target_of(out, "validation", item))
            continue
        inside = chosen[(chosen >= start) & (chosen < start + tally.rows)] - start
        start += tally.rows
        if not len(inside):
            _whole(staged, target_of(out, "train", item))
            continue
        is_chosen = np.zeros(tally.rows, dtype=bool)
        is_chosen[inside] = True
        _filtered(staged, ~is_chosen, target_of(out, "train", item))
        _filtered(staged, is_chosen, target_of(out, "validation", item))


def target_of(out: Path, split: str, item: Slice) -> Path:
    """Where a slice's part of a split lies."""
    return out / "data" / split / item.file


def write_batches(target: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """Publish prepared samples as one Arrow file."""
    with (
        publishing(target) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, PREPARED) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)


def _filtered(
    staged: Path, keep: "np.ndarray[tuple[int], np.dtype[np.bool_]]", target: Path
) -> None:
    if target.exists():
        return
    batches = map_batches(staged)
    starts: Indices = np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
    write_batches(
        target,
        [
            batch.filter(pa.array(keep[start : start + batch.num_rows]))
            for batch, start in zip(batches, starts.tolist(), strict=False)
        ],
    )


def _whole(staged: Path, target: Path) -> None:
    if target.exists():
        return
    with publishing(target) as part:
        part.unlink(missing_ok=True)
        try:
            os.link(staged, part)
        except OSError:  # a file system without links
            shutil.copyfile(staged, part)
