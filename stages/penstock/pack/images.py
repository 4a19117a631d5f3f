"""Images of packed rows: which images each row has, as columns."""

from itertools import chain

import numpy as np
import pyarrow as pa

from penstock.rows.arrow import binary_array, list_array, to_arrow
from penstock.rows.bin_plan import Indices
from penstock.rows.prepared import PreparedSamples
from penstock.rows.schema import IMAGE_DIGEST_BYTES


def image_columns(
    samples: PreparedSamples, chosen: Indices, rows: Indices, documents: int = 1
) -> list[pa.Array]:
    """The images of each row, for data with images. `rows` are the indices of each row's first
    sample, then the number of samples; each of a sample's `documents` has its images."""
    if not samples.has_images:
        return []
    images = [samples.images(sample) for sample in chosen.tolist() for _ in range(documents)]
    before = np.cumsum([0, *(len(digests) for digests, _ in images)])
    starts = before[rows * documents]
    digests, counts = ([*chain.from_iterable(lists)] for lists in zip(*images, strict=True))
    return [
        list_array(starts, binary_array(digests, IMAGE_DIGEST_BYTES)),
        list_array(starts, to_arrow(np.array(counts, np.int32))),
    ]


def image_counts(samples: PreparedSamples, chosen: Indices) -> Indices:
    """Number of images of each chosen sample."""
    return np.array([len(samples.images(sample)[0]) for sample in chosen.tolist()], dtype=np.int64)


def image_facts(samples: PreparedSamples, chosen: Indices) -> dict[str, int]:
    """Number of images of the chosen samples, and of their tokens."""
    if not samples.has_images:
        return {"images": 0, "image_tokens": 0}
    counts = [samples.images(sample)[1] for sample in chosen.tolist()]
    return {"images": sum(map(len, counts)), "image_tokens": sum(map(sum, counts))}
