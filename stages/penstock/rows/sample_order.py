"""The order and the mix of samples: pure functions of sizes, weights, switches and a seed.

Prepared slices keep the order of their source. Shuffling and mixing are this plan on top, so that
another seed or weight costs no tokenising. Every function takes time and memory proportional to the
samples it plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Strategy = Literal["concat", "random", "interleave_under", "interleave_over"]

_BEFORE_MERGING, _MERGED, _ROWS, _STREAM, _DRAWS = 1, 2, 4, 5, 6
"""One stream of random numbers per purpose, so that a switch leaves the others' draws alone."""


@dataclass(frozen=True)
class DatasetMixer:
    """How the samples of several data sets become the epochs that are trained on."""

    seed: int
    strategy: Strategy = "concat"
    weights: tuple[float, ...] = (1.0,)
    """Of every data set, relative to the others."""
    samples_per_epoch: int | None = None
    """`random`: samples in an epoch; None: as many as there are."""
    epochs: int = 1
    """`random`: how many are planned."""
    shuffle_before_merging_datasets: bool = True
    """Shuffle each data set by itself; under `concat` it has no effect on a single one."""
    shuffle_merged_datasets: bool = True
    """Shuffle all samples of an epoch together."""

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> "DatasetMixer":
        """The mixing recorded in a prepared artifact's plan.json."""
        return cls(**{**plan["mix"], "weights": tuple(plan["mix"]["weights"])})

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """The share of every data set in what is drawn; all of them sum to 1."""
        weights = np.array(self.weights, dtype=np.float64)
        return weights / weights.sum()


def epoch_orders(num_rows: Sequence[int], mixing: DatasetMixer) -> list[Indices]:
    """The samples of every epoch in order, as indices into the data sets' concatenation.

    `num_rows[d]` samples are there of data set d. Under `random` there is one array for each of
    `mixing.epochs`, and a sample may come again; otherwise the one array serves every epoch. A data
    set with a weight needs samples, except under `concat`.
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
        streams = [(number,) if number else () for number in range(len(epochs))]
        for epoch, stream in zip(epochs, streams, strict=True):
            generator(mixing.seed, _MERGED, *stream).shuffle(epoch)
    return epochs


def drawn(num_rows: Sequence[int], mixing: DatasetMixer) -> list[int]:
    """How many samples each data set gives to one epoch."""
    if not sum(num_rows) or mixing.strategy == "concat":
        return list(num_rows)
    if mixing.strategy == "random":
        return quotas(mixing.shares, mixing.samples_per_epoch or sum(num_rows))
    return np.bincount(_draws(num_rows, mixing), minlength=len(num_rows)).tolist()


def quotas(shares: npt.NDArray[np.float64], total: int) -> list[int]:
    """`total` divided by shares that sum to 1, exactly: what rounding down leaves over goes to the
    largest remainders, the first of equal ones."""
    exact = shares * total
    whole = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(whole - exact, kind="stable")
    whole[by_remainder[: total - int(whole.sum())]] += 1
    return whole.tolist()


def expected_draws(num_rows: Sequence[int], mixing: DatasetMixer) -> list[float]:
    """Under `interleave_*`: for every data set, the draws after which it has probably run out."""
    pairs = zip(num_rows, mixing.shares.tolist(), strict=True)
    return [rows / share if share else 0.0 for rows, share in pairs]


def draws_until(
    num_rows: Sequence[int],
    shares: npt.NDArray[np.float64],
    ends: Literal["first", "last"],
    random: np.random.Generator,
) -> Indices:
    """Data sets drawn by their shares until the first, or the last, of them has run out.

    The draw that takes the last sample is the final one. Data sets without a share are never drawn.
    """
    drawable = [of for of, share in enumerate(shares) if share]
    expected = [num_rows[of] / shares[of] for of in drawable]
    bounds = np.cumsum(shares)
    bounds[drawable[-1] :] = 1.0  # rounding must not let a draw fall beyond the last
    chosen = np.empty(0, dtype=np.int64)
    size = int(min(expected) if ends == "first" else max(expected)) + 1000
    while True:
        more = np.searchsorted(bounds, random.random(size), side="right")
        chosen = np.concatenate([chosen, more])
        places = (np.flatnonzero(chosen == of) for of in drawable)
        exhausted = [
            int(at[num_rows[of] - 1]) if len(at) >= num_rows[of] else None
            for of, at in zip(drawable, places, strict=True)
        ]
        reached = [end for end in exhausted if end is not None]
        if reached and (ends == "first" or len(reached) == len(drawable)):
            return chosen[: (min if ends == "first" else max)(reached) + 1]
        size = 1000 + len(chosen) // 8


def rows_generator(seed: int, epoch: int) -> np.random.Generator:
    """The random numbers that decide which samples of an epoch share a row."""
    return generator(seed, _ROWS, epoch)


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Random numbers that depend on the seed and the stream alone, on every machine."""
    return np.random.Generator(np.random.PCG64([seed, *stream]))


def _concatenated(num_rows: Sequence[int], mixing: DatasetMixer) -> Indices:
    parts = [np.arange(a, b, dtype=np.int64) for a, b in pairwise(_starts(num_rows))]
    if mixing.shuffle_before_merging_datasets and len(parts) > 1:
        for dataset, part in enumerate(parts):
            generator(mixing.seed, _BEFORE_MERGING, dataset).shuffle(part)
    return np.concatenate(parts)


def _random(num_rows: Sequence[int], mixing: DatasetMixer) -> list[Indices]:
    """Every epoch takes its quota of each data set's stream, from where the last one stopped."""
    wanted = drawn(num_rows, mixing)
    streams = [
        _stream(of, start, size, quota * mixing.epochs, mixing)
        for of, (start, size, quota) in enumerate(
            zip(_starts(num_rows), num_rows, wanted, strict=False)
        )
    ]
    return [
        np.concatenate(
            [
                stream[epoch * quota : (epoch + 1) * quota]
                for stream, quota in zip(streams, wanted, strict=True)
            ]
        )
        for epoch in range(mixing.epochs)
    ]


def _interleaved(num_rows: Sequence[int], mixing: DatasetMixer) -> Indices:
    chosen = _draws(num_rows, mixing)
    found = np.empty(len(chosen), dtype=np.int64)
    for of, (start, size) in enumerate(zip(_starts(num_rows), num_rows, strict=False)):
        places = np.flatnonzero(chosen == of)
        found[places] = _stream(of, start, size, len(places), mixing)
    return found


def _draws(num_rows: Sequence[int], mixing: DatasetMixer) -> Indices:
    ends = "first" if mixing.strategy == "interleave_under" else "last"
    return draws_until(num_rows, mixing.shares, ends, generator(mixing.seed, _DRAWS))


def _stream(dataset: int, start: int, size: int, count: int, mixing: DatasetMixer) -> Indices:
    """The first `count` samples of a data set without end: pass after pass over its `size` samples,
    each shuffled anew if data sets are shuffled by themselves."""
    passes: list[Indices] = [np.empty(0, dtype=np.int64)]
    for number in range(-(-count // size) if count else 0):
        one = np.arange(start, start + size, dtype=np.int64)
        if mixing.shuffle_before_merging_datasets:
            generator(mixing.seed, _STREAM, dataset, number).shuffle(one)
        passes.append(one)
    return np.concatenate(passes)[:count]


def _starts(num_rows: Sequence[int]) -> list[int]:
    return np.concatenate([[0], np.cumsum(num_rows, dtype=np.int64)]).astype(np.int64).tolist()
