"""Rows for a dry run: random tokens in documents of given lengths."""

from collections.abc import Iterator

import numpy as np

from penstock.rows.collate import MicroBatch, collate
from penstock.rows.reader import Row

DOCUMENT_LENGTHS = (200, 1500)
"""Lengths of documents if those of the data are not known, uniformly distributed."""


def synthetic_step(
    count: int, rows_each: int, row_length: int, *, pad_to_multiple_of: int, seed: int = 0
) -> list[MicroBatch]:
    """`count` micro-batches of full rows."""
    rng = np.random.default_rng(seed)
    groups = [
        [_row(index * rows_each + at, row_length, rng) for at in range(rows_each)]
        for index in range(count)
    ]
    laid = collate(groups, pad_to_multiple_of=pad_to_multiple_of)
    return laid.pin_memory().micro_batches()


def mean_pairs_per_token(row_length: int) -> float:
    """Mean number of keys that a query attends to in these rows."""
    lengths = np.array(list(_lengths(row_length, np.random.default_rng(0))), dtype=np.float64)
    return float((lengths * (lengths + 1) / 2).sum() / lengths.sum())


def _row(number: int, row_length: int, rng: np.random.Generator) -> Row:
    ids = rng.integers(0, 256, row_length).astype(np.int32)
    # Every token is trained, as in pretraining: the most that the loss may need.
    return Row(ids, ids, np.array(list(_lengths(row_length, rng)), dtype=np.int32), number)


def _lengths(row_length: int, rng: np.random.Generator) -> Iterator[int]:
    left = row_length
    while left:
        length = min(left, int(rng.integers(*DOCUMENT_LENGTHS)))
        yield length
        left -= length
