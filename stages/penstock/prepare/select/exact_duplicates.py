"""Exact deduplication: samples with the same tokens."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from penstock.prepare.select.ngrams import Hashes
from penstock.rows.arrow import flat
from penstock.rows.sample_order import Indices
from penstock.rows.schema import IMAGES


def token_digests(batches: Iterable[pa.RecordBatch]) -> Hashes:
    """128-bit digests of the samples' tokens and images (and of `desirable`), shape [2, samples].
    Labels are not included."""
    digests = b"".join(digest for batch in batches for digest in _digests(batch))
    return np.ascontiguousarray(np.frombuffer(digests, dtype="<u8").reshape(-1, 2).T)


def exact_duplicates(digests: Hashes) -> Indices:
    """For every sample the first one with the same digest; -1 if it is the first itself."""
    # lexsort is stable: of equal digests, that of the first sample comes first.
    order = np.lexsort((digests[1], digests[0]))
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (digests[:, order[1:]] == digests[:, order[:-1]]).all(axis=0)
    firsts = order[np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))]
    first_index = np.full(len(order), -1, dtype=np.int64)
    first_index[order[again]] = firsts[again]
    return first_index


def _digests(batch: pa.RecordBatch) -> Iterator[bytes]:
    columns = [
        flat(batch.column(name)) for name in batch.schema.names if name.endswith("input_ids")
    ]
    # A memoryview, whose slices are no copies.
    raw = [np.ascontiguousarray(values).view(np.uint8).data for values, _ in columns]
    bounds = [(offsets.astype(np.int64) * values.itemsize).tolist() for values, offsets in columns]
    judged = batch.column("desirable").to_pylist() if "desirable" in batch.schema.names else None
    images = batch.column(IMAGES).to_pylist() if IMAGES in batch.schema.names else None
    for row in range(batch.num_rows):
        # The personalization parts samples with the same tokens that are judged differently.
        digest = blake2b(digest_size=16, person=b"good" if judged and judged[row] else b"")
        for values, ends in zip(raw, bounds, strict=True):
            start, end = ends[row], ends[row + 1]
            # With the lengths, tokens of one column cannot pass for those of the next.
            digest.update((end - start).to_bytes(8, "little"))
            digest.update(values[start:end])
        for image in images[row] if images else ():
            digest.update(image)
        yield digest.digest()
