"""Samples in packed rows: list their digests, and select the rows of some of them."""

from collections.abc import Collection, Iterator
from pathlib import Path

from penstock.rows.filter_rows import iter_new_samples
from penstock.rows.reader import PackedRows, Row
from penstock.rows.schema import SPLITS


def sample_digests(packed: Path) -> list[bytes]:
    """Digests of all samples of a packed artifact, without duplicates, in row order."""
    digests: dict[bytes, None] = {}
    for rows in _splits(packed):
        digests.update(dict.fromkeys(rows.samples()))
    return list(digests)


def iter_rows(packed: Path, digests: Collection[bytes]) -> Iterator[Row]:
    """Yield rows with only the wanted samples, each sample once."""
    skipped = set(sample_digests(packed)).difference(digests)
    every = (rows.row(index) for rows in _splits(packed) for index in range(len(rows)))
    return iter_new_samples(every, skipped)


def _splits(packed: Path) -> Iterator[PackedRows]:
    for split in SPLITS:
        folder = packed / "data" / split
        if folder.is_dir():
            yield PackedRows(folder)
