"""Contaminated samples: those that share a run of tokens with data that must not be trained on.

What many of the avoided samples have in common is their chat template or a system prompt. Training
data with the same one is not contaminated by it, so runs that touch it do not count: else whatever
begins with the same word after the same prompt would be left out.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.prepare.select.ngrams import Hashes, NGrams, TokenLists, iter_samples, ngram_hashes

CLEAN = -1

COMMON = 0.1
FEWEST = 4
"""A run of half the length is common when more than this share of the avoided samples, and this
many at least, hold it."""

SLOTS_PER_RUN = 16
MOST_SLOTS = 1 << 27
"""A run whose slot is empty is none of those to be avoided; few others have to be looked up."""


def half_ngram(length: int) -> int:
    """Tokens of the runs by which common parts are told."""
    return max(1, length // 2)


def count_short_ngrams(batches: Iterable[pa.RecordBatch], length: int) -> Hashes:
    """Of one slice, shape [2, runs]: the runs of half the length, and in how many samples each is.

    A run is told of in order of its hash.
    """
    found = [np.empty(0, dtype=np.uint64)]
    for batch in batches:
        for samples in iter_samples(batch):
            runs = ngram_hashes(samples, half_ngram(length))
            order = np.lexsort((runs.samples, runs.hashes))
            hashes, of = runs.hashes[order], runs.samples[order]
            first = np.ones(len(hashes), dtype=bool)
            first[1:] = (hashes[1:] != hashes[:-1]) | (of[1:] != of[:-1])
            found.append(hashes[first])
    unique, counts = np.unique(np.concatenate(found), return_counts=True)
    return np.stack([unique, counts.astype(np.uint64)])


def common_ngrams(of_slices: Sequence[Hashes], num_samples: int) -> Hashes:
    """Those of the short runs that are common among all avoided samples, in order."""
    both = np.concatenate([np.empty((2, 0), dtype=np.uint64), *of_slices], axis=1)
    hashes, where = np.unique(both[0], return_inverse=True)
    counts = np.bincount(where, both[1].astype(np.float64), len(hashes))
    return hashes[(counts > COMMON * num_samples) & (counts >= FEWEST)]


def ngrams_excluding_common(
    batches: Iterable[pa.RecordBatch], length: int, common: Hashes
) -> Hashes:
    """Of one slice: the runs of the whole length that touch no common run, in order."""
    found = [np.empty(0, dtype=np.uint64)]
    for batch in batches:
        for samples in iter_samples(batch):
            runs = ngram_hashes(samples, length)
            covered = np.concatenate(
                [[0], np.cumsum(_mask_common(samples, half_ngram(length), common))]
            )
            found.append(runs.hashes[covered[runs.starts + length] == covered[runs.starts]])
    return np.unique(np.concatenate(found))


class ContaminationIndex:
    """The runs that must not be trained on, of several data sets."""

    def __init__(self, runs: Sequence[tuple[int, Hashes]]) -> None:
        """`runs` are (data set, its telling runs) for every slice."""
        datasets = np.repeat([of for of, _ in runs], [len(its) for _, its in runs])
        hashes = np.concatenate([np.empty(0, dtype=np.uint64), *(its for _, its in runs)])
        self._hashes, first = np.unique(hashes, return_index=True)
        self._datasets = datasets[first]
        size = min(1 << (SLOTS_PER_RUN * len(self._hashes)).bit_length(), MOST_SLOTS)
        self._slots = np.zeros(size, dtype=bool)
        self._slots[self._hashes % np.uint64(size)] = True

    def match(self, batches: Iterable[pa.RecordBatch], length: int) -> npt.NDArray[np.int16]:
        """For every sample, the data set that it shares a run with, or CLEAN."""
        parts = [np.empty(0, dtype=np.int16)]
        for batch in batches:
            for samples in iter_samples(batch):
                found = np.full(len(samples), CLEAN, dtype=np.int16)
                known, places = self._lookup(ngram_hashes(samples, length))
                # Backwards, so that the first of a sample's runs is the one that stays.
                found[known[::-1]] = self._datasets[places[::-1]]
                parts.append(found)
        return np.concatenate(parts)

    def _lookup(self, runs: NGrams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(sample, place of the hash) of the runs that are to be avoided."""
        likely = self._slots[runs.hashes % np.uint64(len(self._slots))]
        hashes, of = runs.hashes[likely], runs.samples[likely]
        places = np.searchsorted(self._hashes, hashes)
        places = np.minimum(places, max(0, len(self._hashes) - 1))
        is_known = self._hashes[places] == hashes if len(hashes) else likely[:0]
        return of[is_known], places[is_known]


def _mask_common(samples: TokenLists, length: int, common: Hashes) -> npt.NDArray[np.bool_]:
    """Which tokens lie in a common run."""
    runs = ngram_hashes(samples, length)
    starts = runs.starts[np.isin(runs.hashes, common)]
    steps = np.zeros(len(samples.values) + 1, dtype=np.int64)
    np.add.at(steps, starts, 1)
    np.add.at(steps, starts + length, -1)
    return np.cumsum(steps)[:-1] > 0
