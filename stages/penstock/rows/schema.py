"""The Arrow schemas of prepared samples and of packed rows, shared by all who use them."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

IGNORED = -100
"""The label of a position that is not trained."""

PREPARED = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
    ]
)
"""One sample a row. Labels are unshifted (label t belongs to token t) and -100 where masked.
`source` is the label of the data set, `row` the record's place in it, from 0."""

PACKED = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("lengths", pa.list_(pa.int32()), nullable=False),
    ]
)
"""One packed row a row, without padding: `lengths` sum to the number of tokens. Labels are shifted
once (label t is the target of position t) and -100 at the last position of every document."""

SPLITS = ("train", "validation")


def histogram(lengths: npt.ArrayLike) -> dict[str, int]:
    """How many lengths lie in each power-of-two bucket, keyed by its upper end (inclusive)."""
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    exponents = np.ceil(np.log2(sizes)).astype(np.int64)
    found, counts = np.unique(exponents, return_counts=True)
    return {str(1 << e): n for e, n in zip(found.tolist(), counts.tolist(), strict=True)}
