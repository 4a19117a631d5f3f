"""Shuffling and mixing of data sets: pure functions of sizes, weights, options and a seed.

Prepared slices keep the order of their source; shuffling and mixing only reorder indices, so a new
seed or weight needs no tokenization. Every function takes time and memory proportional to the
number of samples it plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Strategy = Literal["concat", "random", "interleave_under", "interleave_over"]

# One random stream per purpose, so that changing one option does not change the other draws.
_BEFORE_MERGING, _MERGED, _ROWS, _STREAM, _DRAWS = 1, 2, 4, 5, 6


@dataclass(frozen=True)
class DatasetMixer:
    """How the samples of several data sets are mixed into epochs."""

    seed: int
    strategy: Strategy = "concat"
    weights: tuple[float, ...] = (1.0,)
    """Relative weight of every data set."""
    samples_per_epoch: int | None = None
    """With `random`: samples per epoch; None: the number of all samples."""
    epochs: int = 1
    """With `random`: number of planned epochs."""
    shuffle_before_merging_datasets: bool = True
    """Shuffle each data set separately; no effect with `concat` and a single data set."""
    shuffle_merged_datasets: bool = True
    """Shuffle all samples of an epoch together."""

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> "DatasetMixer":
        """Build from a prepared artifact's plan.json."""
        return cls(**{**plan["mix"], "weights": tuple(plan["mix"]["weights"])})

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """Sampling probability of every data set; they sum to 1."""
        weights = np.array(self.weights, dtype=np.float64)
        return weights / weights.sum()


def epoch_orders(num_rows: Sequence[int], mixing: DatasetMixer) -> list[Indices]:
    """Sample indices of every epoch, in order, into the concatenation of the data sets.

    Data set d has `num_rows[d]` samples. With `random` there is one array for each of
    `mixing.epochs`, and samples may repeat; otherwise one array serves every epoch. A data set with
    a weight above 0 needs samples, except with `concat`.
    """
    if not sum(num_rows):
        return [np.empty(0, dtype=np.int64)]
    if mixing.strategy == "concat":
        epochs = [_concatenated(num_rows, mixing)]
    elif mixing.strategy == "random":
        epochs = _random(num_rows, mixing)
    else:
        epochs = [_interleaved(num_rows, mixing)]
    if mixing.shuffle_merged_datasets:
        # The first epoch is shuffled as the single epoch of other strategies is.
        streams = [(number,) if number else () for number in range(len(epochs))]
        for epoch, stream in zip(epochs, streams, strict=True):
            generator(mixing.seed, _MERGED, *stream).shuffle(epoch)
    return epochs


def samples_per_dataset(num_rows: Sequence[int], mixing: DatasetMixer) -> list[int]:
    """Number of samples of each data set in one epoch."""
    if not sum(num_rows) or mixing.strategy == "concat":
        return list(num_rows)
    if mixing.strategy == "random":
        return quotas(mixing.shares, mixing.samples_per_epoch or sum(num_rows))
    return np.bincount(_draws(num_rows, mixing), minlength=len(num_rows)).tolist()


def quotas(shares: npt.NDArray[np.float64], total: int) -> list[int]:
    """Split `total` by shares that sum to 1, by the largest remainder method; of equal remainders
    the first one is rounded up."""
    exact = shares * total
    floors = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(floors - exact, kind="stable")
    floors[by_remainder[: total - int(floors.sum())]] += 1
    return floors.tolist()


def expected_draws(num_rows: Sequence[int], mixing: DatasetMixer) -> list[float]:
    """With `interleave_*`: expected number of draws until each data set is exhausted."""
    pairs = zip(num_rows, mixing.shares.tolist(), strict=True)
    return [rows / share if share else 0.0 for rows, share in pairs]


def draws_until(
    num_rows: Sequence[int],
    shares: npt.NDArray[np.float64],
    ends: Literal["first", "last"],
    random: np.random.Generator,
) -> Indices:
    """Draw data sets by their shares until the first, or the last, of them is exhausted.

    The draw that takes its last sample is the final one. Data sets with share 0 are never drawn.
    """
    drawable = [of for of, share in enumerate(shares) if share]
    expected = [num_rows[of] / shares[of] for of in drawable]
    bounds = np.cumsum(shares)
    bounds[drawable[-1] :] = 1.0  # rounding must not let a draw fall beyond the last
    chosen = np.empty(0, dtype=np.int64)
    size = int(min(expected) if ends == "first" else max(expected)) + 1000
    while True:
        # Doubles come one by one from the stream, so the sizes of blocks do not change the draws.
        more = np.searchsorted(bounds, random.random(size), side="right")
        chosen = np.concatenate([chosen, more])
        positions = (np.flatnonzero(chosen == of) for of in drawable)
        exhausted = [
            int(indices[num_rows[of] - 1]) if len(indices) >= num_rows[of] else None
            for of, indices in zip(drawable, positions, strict=True)
        ]
        reached = [end for end in exhausted if end is not None]
        if reached and (ends == "first" or len(reached) == len(drawable)):
            return chosen[: (min if ends == "first" else max)(reached) + 1]
        size = 1000 + len(chosen) // 8


def rows_generator(seed: int, epoch: int) -> np.random.Generator:
    """Random generator for packing the samples of an epoch into rows."""
    return generator(seed, _ROWS, epoch)


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Random generator that depends only on the seed and the stream, on every machine."""
    # By name: np.random.default_rng may take another bit generator in a later NumPy.
    return np.random.Generator(np.random.PCG64([seed, *stream]))


def _concatenated(num_rows: Sequence[int], mixing: DatasetMixer) -> Indices:
    parts = [np.arange(a, b, dtype=np.int64) for a, b in pairwise(_starts(num_rows))]
    if mixing.shuffle_before_merging_datasets and len(parts) > 1:
        for dataset, part in enumerate(parts):
            generator(mixing.seed, _BEFORE_MERGING, dataset).shuffle(part)
    return np.concatenate(parts)


def _random(num_rows: Sequence[int], mixing: DatasetMixer) -> list[Indices]:
    """Each epoch takes its quota of each data set's stream, where the previous epoch stopped."""
    num_samples = samples_per_dataset(num_rows, mixing)
    streams = [
        _stream(of, start, size, quota * mixing.epochs, mixing)
        for of, (start, size, quota) in enumerate(
            zip(_starts(num_rows), num_rows, num_samples, strict=False)
        )
    ]
    return [
        np.concatenate(
            [
                stream[epoch * quota : (epoch + 1) * quota]
                for stream, quota in zip(streams, num_samples, strict=True)
            ]
        )
        for epoch in range(mixing.epochs)
    ]


def _interleaved(num_rows: Sequence[int], mixing: DatasetMixer) -> Indices:
    chosen = _draws(num_rows, mixing)
    order = np.empty(len(chosen), dtype=np.int64)
    for of, (start, size) in enumerate(zip(_starts(num_rows), num_rows, strict=False)):
        positions = np.flatnonzero(chosen == of)
        order[positions] = _stream(of, start, size, len(positions), mixing)
    return order


def _draws(num_rows: Sequence[int], mixing: DatasetMixer) -> Indices:
    ends = "first" if mixing.strategy == "interleave_under" else "last"
    return draws_until(num_rows, mixing.shares, ends, generator(mixing.seed, _DRAWS))


def _stream(dataset: int, start: int, size: int, count: int, mixing: DatasetMixer) -> Indices:
    """The first `count` samples of an endless stream of passes over the data set's `size` samples.

    Each pass is reshuffled with `shuffle_before_merging_datasets`.
    """
    passes: list[Indices] = [np.empty(0, dtype=np.int64)]
    for number in range(-(-count // size) if count else 0):
        block = np.arange(start, start + size, dtype=np.int64)
        if mixing.shuffle_before_merging_datasets:
            generator(mixing.seed, _STREAM, dataset, number).shuffle(block)
        passes.append(block)
    return np.concatenate(passes)[:count]


def _starts(num_rows: Sequence[int]) -> list[int]:
    return np.concatenate([[0], np.cumsum(num_rows, dtype=np.int64)]).astype(np.int64).tolist()
