"""The Arrow schemas of prepared samples and packed rows."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.config.schema.dataset import Kind

IGNORED = -100
"""Label of a position that is not trained (ignore_index)."""

IMAGE_DIGEST_BYTES = 32
"""Size of the digest of an image: SHA-256 of its encoded bytes."""

_TOKENS = pa.list_(pa.int32())
_ORIGIN = [
    pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    pa.field("row", pa.int64(), nullable=False),
]

PREPARED = pa.schema(
    [
        pa.field("input_ids", _TOKENS, nullable=False),
        pa.field("labels", _TOKENS, nullable=False),
        *_ORIGIN,
    ]
)
"""SFT: one sample per row. Labels are unshifted (label t belongs to token t) and -100 where masked.
`source` is the label of the data set, `row` the index of the record in its slice, from 0."""

PREPARED_PAIRS = pa.schema(
    [
        pa.field("chosen_input_ids", _TOKENS, nullable=False),
        pa.field("chosen_labels", _TOKENS, nullable=False),
        pa.field("rejected_input_ids", _TOKENS, nullable=False),
        pa.field("rejected_labels", _TOKENS, nullable=False),
        *_ORIGIN,
    ]
)
"""Preference pairs: one pair per row. Each side is the prompt and a completion; labels are the
completion's tokens. Both sides start with the same prompt, which ends at the first label."""

PREPARED_KTO = pa.schema(
    [
        pa.field("input_ids", _TOKENS, nullable=False),
        pa.field("labels", _TOKENS, nullable=False),
        pa.field("desirable", pa.bool_(), nullable=False),
        *_ORIGIN,
    ]
)
"""KTO: one completion per row, desirable or not."""

PREPARED_SCORED = pa.schema(
    [
        *(field for field in PREPARED_PAIRS if field not in _ORIGIN),
        pa.field("score_gap", pa.float32(), nullable=False),
        *_ORIGIN,
    ]
)
"""Preference pairs with `score_gap`: chosen score minus rejected score, at least 0."""

PREPARED_SCHEMAS: dict[Kind, pa.Schema] = {
    "sft": PREPARED,
    "preference": PREPARED_PAIRS,
    "kto": PREPARED_KTO,
}
"""Schema of prepared data by kind."""


LOSS_WEIGHTS = pa.field("loss_weights", pa.list_(pa.float32()), nullable=False)
"""Column of SFT data of which some loss weights are not 1, after the other columns of tokens: the
loss weight of each label, in the place of the label; 0 where there is none."""

IMAGES, IMAGE_TOKENS = "images", "image_tokens"

IMAGE_COLUMNS = [
    pa.field(IMAGES, pa.list_(pa.binary(IMAGE_DIGEST_BYTES)), nullable=False),
    pa.field(IMAGE_TOKENS, pa.list_(pa.int32()), nullable=False),
]
"""Columns of data with images, before the origin: digests of the sample's images in order, and the
number of image tokens of each. In packed rows they come last, with the images of all documents in
the order of their tokens."""

IMAGE_COUNTS = pa.field("image_counts", pa.list_(pa.int32()), nullable=False)
"""Column of packed preference data with images, after these: number of images of each document."""


def prepared_schema(
    kind: Kind, *, is_scored: bool = False, has_images: bool = False, is_weighted: bool = False
) -> pa.Schema:
    """Schema of prepared data of a kind; preference pairs may have scores."""
    plain = PREPARED_SCORED if is_scored else PREPARED_SCHEMAS[kind]
    further = [*([LOSS_WEIGHTS] if is_weighted else []), *(IMAGE_COLUMNS if has_images else [])]
    if not further:
        return plain
    return pa.schema([*(f for f in plain if f not in _ORIGIN), *further, *_ORIGIN])


PACKED = pa.schema(
    [
        pa.field("input_ids", _TOKENS, nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("lengths", pa.list_(pa.int32()), nullable=False),
    ]
)
"""SFT: one packed sequence per row, without padding. `lengths` are document lengths and sum to the
number of tokens. Labels are shifted once (label t is the target of position t) and -100 at the last
position of every document."""

DIGEST_BYTES = 16
"""Size of the digest that identifies a sample by its content."""

PACKED_PAIRS = pa.schema(
    [
        *PACKED,
        pa.field("prompts", pa.list_(pa.int32()), nullable=False),
        pa.field("branches", pa.list_(pa.int32()), nullable=False),
        pa.field("samples", pa.list_(pa.binary(DIGEST_BYTES)), nullable=False),
    ]
)
"""Preference pairs: one packed sequence per row, with prefix sharing (see `rows.shared_prefix`).
The last position of each branch also has a label. `prompts` are the numbers of shared tokens per
document, `branches` the tokens per branch, `samples` the digest of each pair."""

PACKED_KTO = pa.schema([*PACKED_PAIRS, pa.field("desirable", pa.list_(pa.bool_()), False)])
"""KTO: of each two branches the first is the completion, which is `desirable` or not, and the
second a mismatched completion (of another prompt) for the KL baseline."""

PACKED_SCORED = pa.schema([*PACKED_PAIRS, pa.field("score_gaps", pa.list_(pa.float32()), False)])
"""Preference pairs with the score gap of each."""

PACKED_SCHEMAS: dict[Kind, pa.Schema] = {
    "sft": PACKED,
    "preference": PACKED_PAIRS,
    "kto": PACKED_KTO,
}
"""Schema of packed rows by kind."""


def packed_schema(
    kind: Kind, *, is_scored: bool = False, has_images: bool = False, is_weighted: bool = False
) -> pa.Schema:
    """Schema of packed rows of a kind; preference pairs may have scores."""
    plain = PACKED_SCORED if is_scored else PACKED_SCHEMAS[kind]
    further = [LOSS_WEIGHTS] if is_weighted else []
    if has_images:
        further += [*IMAGE_COLUMNS, *([] if kind == "sft" else [IMAGE_COUNTS])]
    return pa.schema([*plain, *further]) if further else plain


SPLITS = ("train", "validation")


def histogram(lengths: npt.ArrayLike) -> dict[str, int]:
    """Number of lengths in each power-of-two bucket, keyed by its inclusive upper bound."""
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    exponents = np.ceil(np.log2(sizes)).astype(np.int64)
    values, counts = np.unique(exponents, return_counts=True)
    return {str(1 << e): n for e, n in zip(values.tolist(), counts.tolist(), strict=True)}
