"""Decontamination: find samples that share an n-gram with data that must not be trained on.

Many decontamination samples share a chat template or system prompt. Training data with the same
template is not contaminated by it, so n-grams that overlap such common parts are ignored.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.prepare.select.ngrams import Hashes, NGrams, iter_samples, ngram_hashes

CLEAN = -1

COMMON = 0.1
FEWEST = 4
"""An n-gram of half the length is common if more than this share of the decontamination samples,
and at least this many, contain it."""

SLOTS_PER_RUN = 16
# Size of the hash table that filters n-grams before the binary search: most have empty slots.
MOST_SLOTS = 1 << 27


def half_ngram(length: int) -> int:
    """Length of the n-grams by which common parts are detected."""
    return max(1, length // 2)


def count_short_ngrams(batches: Iterable[pa.RecordBatch], length: int) -> Hashes:
    """Short n-grams (half the length) of one slice and the number of samples with each, shape
    [2, n-grams], sorted by hash."""
    slice_hashes = [np.empty(0, dtype=np.uint64)]
    for samples in iter_samples(batches):
        runs = ngram_hashes(samples, half_ngram(length))
        order = np.lexsort((runs.samples, runs.hashes))
        hashes, of = runs.hashes[order], runs.samples[order]
        first = np.ones(len(hashes), dtype=bool)
        first[1:] = (hashes[1:] != hashes[:-1]) | (of[1:] != of[:-1])
        slice_hashes.append(hashes[first])
    unique, counts = np.unique(np.concatenate(slice_hashes), return_counts=True)
    return np.stack([unique, counts.astype(np.uint64)])


def common_ngrams(of_slices: Sequence[Hashes], num_samples: int) -> Hashes:
    """The short n-grams that are common among all decontamination samples, sorted."""
    hash_counts = np.concatenate([np.empty((2, 0), dtype=np.uint64), *of_slices], axis=1)
    hashes, inverse = np.unique(hash_counts[0], return_inverse=True)
    counts = np.bincount(inverse, hash_counts[1].astype(np.float64), len(hashes))
    return hashes[(counts > COMMON * num_samples) & (counts >= FEWEST)]


def ngrams_excluding_common(
    batches: Iterable[pa.RecordBatch], length: int, common: Hashes
) -> Hashes:
    """The n-grams of one slice that do not overlap a common short n-gram, sorted."""
    hashes = [np.empty(0, dtype=np.uint64)]
    for samples in iter_samples(batches):
        runs = ngram_hashes(samples, length)
        # Number of tokens in a common n-gram before each token.
        shorter = ngram_hashes(samples, half_ngram(length))
        starts = shorter.starts[np.isin(shorter.hashes, common)]
        steps = np.zeros(len(samples.values) + 1, dtype=np.int64)
        # Not `steps[starts] += 1`, which adds once where an index is there twice.
        np.add.at(steps, starts, 1)
        np.add.at(steps, starts + half_ngram(length), -1)
        covered = np.concatenate([[0], np.cumsum(np.cumsum(steps)[:-1] > 0)])
        hashes.append(runs.hashes[covered[runs.starts + length] == covered[runs.starts]])
    return np.unique(np.concatenate(hashes))


class ContaminationIndex:
    """Index of the n-grams of decontamination data sets."""

    def __init__(self, runs: Sequence[tuple[int, Hashes]]) -> None:
        """`runs` are (data set index, n-gram hashes) for every slice."""
        datasets = np.repeat([of for of, _ in runs], [len(run) for _, run in runs])
        hashes = np.concatenate([np.empty(0, dtype=np.uint64), *(run for _, run in runs)])
        self._hashes, first = np.unique(hashes, return_index=True)
        self._datasets = datasets[first]
        size = min(1 << (SLOTS_PER_RUN * len(self._hashes)).bit_length(), MOST_SLOTS)
        self._slots = np.zeros(size, dtype=bool)
        self._slots[self._hashes % np.uint64(size)] = True

    def match(self, batches: Iterable[pa.RecordBatch], length: int) -> npt.NDArray[np.int16]:
        """For every sample, the data set with which it shares an n-gram, or CLEAN."""
        parts = [np.empty(0, dtype=np.int16)]
        for samples in iter_samples(batches):
            matches = np.full(len(samples), CLEAN, dtype=np.int16)
            matched_samples, positions = self._lookup(ngram_hashes(samples, length))
            # Reversed, so that the first match of a sample is written last.
            matches[matched_samples[::-1]] = self._datasets[positions[::-1]]
            parts.append(matches)
        return np.concatenate(parts)

    def _lookup(self, runs: NGrams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(sample, index of the hash) of the n-grams that are in the index."""
        likely = self._slots[runs.hashes % np.uint64(len(self._slots))]
        hashes, of = runs.hashes[likely], runs.samples[likely]
        positions = np.searchsorted(self._hashes, hashes)
        positions = np.minimum(positions, max(0, len(self._hashes) - 1))
        is_known = self._hashes[positions] == hashes if len(hashes) else likely[:0]
        return of[is_known], positions[is_known]
