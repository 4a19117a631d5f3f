"""Near deduplication: MinHash LSH candidates, confirmed by exact Jaccard similarity.

A sample is the set of its shingles (n-grams of SHINGLE tokens). Two samples are near duplicates if
the Jaccard similarity of their sets reaches the threshold. The signature of a set is its minimum
hash under each of PERMUTATIONS permutations (Broder, On the resemblance and containment of
documents, 1997). Samples that share a band of their signatures are candidates; their exact
similarity is then computed, so there are no false positives.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.prepare.select.ngrams import (
    Hashes,
    TokenLists,
    iter_samples,
    ngram_hashes,
    splitmix64,
)
from penstock.rows.sample_order import Indices

SHINGLE = 5
"""Tokens per shingle."""

PERMUTATIONS = 128
RECALL = 0.999
"""Minimum probability that a pair at the threshold becomes a candidate."""

# Maximum samples per bucket that later samples are compared with: a part that many samples share (a
# long system prompt) would make the time quadratic.
MAX_PER_BUCKET = 1000

MAX_CANDIDATES = 32
"""Maximum candidates per sample that are compared, those with most shared bands first."""

Bands = npt.NDArray[np.uint32]


def rows_per_band(threshold: float) -> int:
    """Maximum hashes per band for which a pair at the threshold is found with probability RECALL.

    At least one of b = PERMUTATIONS // r bands of r hashes agrees with probability
    1 - (1 - t**r)**b.
    """
    # The S-curve of locality-sensitive hashing: Leskovec, Rajaraman and Ullman, Mining of
    # Massive Datasets, section 3.4.
    fitting = [
        r
        for r in range(1, PERMUTATIONS + 1)
        if 1 - (1 - threshold**r) ** (PERMUTATIONS // r) >= RECALL
    ]
    return max(fitting, default=1)


def lsh_bands(batches: Iterable[pa.RecordBatch], rows: int) -> Bands:
    """Hash of each band of each sample, shape [PERMUTATIONS // rows, samples]."""
    parts = [_hash_bands(_minhash_signatures(samples), rows) for samples in iter_samples(batches)]
    return np.concatenate([np.empty((PERMUTATIONS // rows, 0), dtype=np.uint32), *parts], axis=1)


def compute_shingles(samples: TokenLists) -> Hashes:
    """Sorted shingle hashes of one sample; a sample shorter than a shingle is one shingle."""
    return np.unique(ngram_hashes(samples, SHINGLE, shorter="whole").hashes)


def jaccard(first: Hashes, second: Hashes) -> float:
    """Jaccard similarity of two sorted sets."""
    joined = np.concatenate([first, second])
    joined.sort(kind="stable")  # timsort merges the two sorted halves
    common = int(np.count_nonzero(joined[1:] == joined[:-1]))
    return common / (len(first) + len(second) - common)


def near_duplicates(
    bands: Iterable[Bands],
    shingles: Callable[[int], Hashes],
    threshold: float,
    num_fixed: int = 0,
) -> dict[int, int]:
    """Find near duplicates of earlier kept samples: {sample: kept sample}.

    Samples are considered in order. `bands` yields the hashes of one band of all samples after
    another; `shingles` returns a sample's set. The first `num_fixed` samples are always kept. Only
    kept samples are compared with, so a dropped sample does not cause others to be dropped.
    """
    members, buckets = _shared_buckets(bands)
    bounds = np.flatnonzero(np.diff(members, prepend=-1, append=-1))
    kept_in: dict[int, list[int]] = {}
    repeated: dict[int, int] = {}
    for low, high in pairwise(bounds):
        sample, sample_buckets = int(members[low]), buckets[low:high].tolist()
        if sample >= num_fixed:
            shared = Counter(kept for bucket in sample_buckets for kept in kept_in.get(bucket, ()))
            own = shingles(sample) if shared else np.empty(0, np.uint64)
            likely = (candidate for candidate, _ in shared.most_common(MAX_CANDIDATES))
            near = next((c for c in likely if jaccard(own, shingles(c)) >= threshold), None)
            if near is not None:
                repeated[sample] = near
                continue
        for bucket in sample_buckets:
            bucket_samples = kept_in.setdefault(bucket, [])
            if len(bucket_samples) < MAX_PER_BUCKET:
                bucket_samples.append(sample)
    return repeated


def _shared_buckets(bands: Iterable[Bands]) -> tuple[Indices, Indices]:
    """(sample, bucket) for all buckets with at least two samples, sorted by sample."""
    members = [np.empty(0, dtype=np.int64)]
    buckets = [np.empty(0, dtype=np.int64)]
    count = 0
    for band in bands:
        order = np.argsort(band, kind="stable")
        same = np.diff(band[order], prepend=np.uint32(0)) == 0
        # Nothing is before the first, which may be the 0 that is prepended.
        same[:1] = False
        shared = same | np.append(same[1:], [False])[: len(same)]
        starts = shared & ~same
        members.append(order[shared])
        buckets.append(count + np.cumsum(starts)[shared])
        count += int(starts.sum()) + 1
    sample, bucket = np.concatenate(members), np.concatenate(buckets)
    order = np.argsort(sample, kind="stable")
    return sample[order], bucket[order]


def _minhash_signatures(samples: TokenLists) -> npt.NDArray[np.uint32]:
    """Minimum hash of each sample under every permutation, shape [PERMUTATIONS, samples]."""
    signatures = np.empty((PERMUTATIONS, len(samples)), dtype=np.uint32)
    hashes, of, _ = ngram_hashes(samples, SHINGLE, shorter="whole")
    # `whole` gives each sample a shingle: of an empty range reduceat takes the next one's value.
    first = np.flatnonzero(np.diff(of, prepend=-1))
    values = (hashes >> np.uint64(32)).astype(np.uint32)
    permuted = np.empty_like(values)
    for number, (factor, term) in enumerate(_PERMUTATIONS):
        np.multiply(values, factor, out=permuted)
        np.add(permuted, term, out=permuted)
        np.minimum.reduceat(permuted, first, out=signatures[number])
    return signatures


def _hash_bands(signatures: npt.NDArray[np.uint32], rows: int) -> Bands:
    count = PERMUTATIONS // rows
    total = np.zeros((count, signatures.shape[1]), dtype=np.uint64)
    for row in range(rows):
        total = splitmix64(total + signatures[row * count : (row + 1) * count])
    return (total >> np.uint64(32)).astype(np.uint32)


_PERMUTATIONS = splitmix64(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64)).astype(np.uint32)
_PERMUTATIONS = _PERMUTATIONS.reshape(PERMUTATIONS, 2)
_PERMUTATIONS[:, 0] |= 1
"""(factor, term) of affine bijections of 32-bit integers, whose factors are odd."""
