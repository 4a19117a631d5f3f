"""The order of samples: a pure function of sizes, switches and a seed.

Prepared slices keep the order of their source. What people call shuffling is this plan on top, so
that another seed costs no tokenising.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_BEFORE_MERGING, _MERGED, _VALIDATION, _ROWS = 1, 2, 3, 4
"""One stream of random numbers per purpose, so that a switch leaves the others' draws alone."""


@dataclass(frozen=True)
class Ordering:
    """Which shuffles apply, and their seed."""

    seed: int
    shuffle_before_merging_datasets: bool
    """Shuffle each data set by itself; it has no effect on a single one."""
    shuffle_merged_datasets: bool
    """Shuffle all samples together."""

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> "Ordering":
        """The ordering recorded in a prepared artifact's plan.json."""
        return cls(**plan["order"])


def global_order(num_rows: Sequence[int], ordering: Ordering) -> Indices:
    """The order of the samples of several data sets, as indices into their concatenation.

    `num_rows[d]` samples come from data set d; sum(num_rows) indices are returned.
    """
    starts = np.concatenate([[0], np.cumsum(num_rows, dtype=np.int64)])
    parts = [np.arange(a, b, dtype=np.int64) for a, b in pairwise(starts)]
    if ordering.shuffle_before_merging_datasets and len(parts) > 1:
        parts = [
            generator(ordering.seed, _BEFORE_MERGING, dataset).permutation(part)
            for dataset, part in enumerate(parts)
        ]
    merged = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    if ordering.shuffle_merged_datasets:
        merged = generator(ordering.seed, _MERGED).permutation(merged)
    return merged


def validation_rows(num_rows: int, size: int | float | None, seed: int) -> Indices:
    """Which of `num_rows` samples are set aside for validation, in increasing order.

    `size` is a number of samples (int) or a share below one (float; rounded, at least one).
    """
    if not size or not num_rows:
        return np.empty(0, dtype=np.int64)
    wanted = max(1, round(size * num_rows)) if isinstance(size, float) else size
    chosen = generator(seed, _VALIDATION).permutation(num_rows)[:wanted]
    return np.sort(chosen).astype(np.int64)


def row_order(num_rows: int, seed: int) -> Indices:
    """The order in which packed rows are stored when packing has sorted them by length."""
    return generator(seed, _ROWS).permutation(num_rows).astype(np.int64)


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Random numbers that depend on the seed and the stream alone, on every machine."""
    return np.random.Generator(np.random.PCG64([seed, *stream]))
