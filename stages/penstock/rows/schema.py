"""The Arrow schemas of prepared samples and of packed rows, shared by all who use them."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.config.schema.dataset import Kind

IGNORED = -100
"""The label of a position that is not trained."""

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
"""One sample a row. Labels are unshifted (label t belongs to token t) and -100 where masked.
`source` is the label of the data set, `row` the record's place in its slice, from 0."""

PREPARED_PAIRS = pa.schema(
    [
        pa.field("chosen_input_ids", _TOKENS, nullable=False),
        pa.field("chosen_labels", _TOKENS, nullable=False),
        pa.field("rejected_input_ids", _TOKENS, nullable=False),
        pa.field("rejected_labels", _TOKENS, nullable=False),
        *_ORIGIN,
    ]
)
"""One preference a row: each side is the prompt and an answer, with the answer's tokens as labels.
The two begin with the same prompt, which ends where the first label is."""

PREPARED_JUDGED = pa.schema(
    [
        pa.field("input_ids", _TOKENS, nullable=False),
        pa.field("labels", _TOKENS, nullable=False),
        pa.field("desirable", pa.bool_(), nullable=False),
        *_ORIGIN,
    ]
)
"""One judged answer a row."""

PREPARED_SCORED = pa.schema(
    [
        *(field for field in PREPARED_PAIRS if field not in _ORIGIN),
        pa.field("score_gap", pa.float32(), nullable=False),
        *_ORIGIN,
    ]
)
"""The same of scored answers: by how much the chosen one is scored higher, at least 0."""

PREPARED_OF: dict[Kind, pa.Schema] = {
    "sft": PREPARED,
    "preference": PREPARED_PAIRS,
    "kto": PREPARED_JUDGED,
}
"""The columns of prepared data, by what it is for."""


def prepared_schema(kind: Kind, *, is_scored: bool = False) -> pa.Schema:
    """The columns of prepared data of a kind, which for pairs may be scored."""
    return PREPARED_SCORED if is_scored else PREPARED_OF[kind]


PACKED = pa.schema(
    [
        pa.field("input_ids", _TOKENS, nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("lengths", pa.list_(pa.int32()), nullable=False),
    ]
)
"""One packed row a row, without padding: `lengths` sum to the number of tokens. Labels are shifted
once (label t is the target of position t) and -100 at the last position of every document."""

DIGEST_BYTES = 16
"""Of what names a sample by its content."""

PACKED_PAIRS = pa.schema(
    [
        *PACKED,
        pa.field("prompts", pa.list_(pa.int32()), nullable=False),
        pa.field("branches", pa.list_(pa.int32()), nullable=False),
        pa.field("samples", pa.list_(pa.binary(DIGEST_BYTES)), nullable=False),
    ]
)
"""One packed row a row, of documents that branch: two answers to a prompt, with labels also at the
last position of each. `prompts` are the shared tokens of every document, `branches` the tokens of
every branch (see `rows.branching`), `samples` a digest of every two."""

PACKED_JUDGED = pa.schema([*PACKED_PAIRS, pa.field("desirable", pa.list_(pa.bool_()), False)])
"""The same for judged answers: the first branch is the answer, which is `desirable` or not, and the
second one another prompt's answer."""

PACKED_SCORED = pa.schema([*PACKED_PAIRS, pa.field("score_gaps", pa.list_(pa.float32()), False)])
"""Pairs and by how much the first answer of each is scored higher."""

PACKED_OF: dict[Kind, pa.Schema] = {
    "sft": PACKED,
    "preference": PACKED_PAIRS,
    "kto": PACKED_JUDGED,
}
"""The columns of packed rows, by what they are for."""


def packed_schema(kind: Kind, *, is_scored: bool = False) -> pa.Schema:
    """The columns of packed rows of a kind, which for pairs may be scored."""
    return PACKED_SCORED if is_scored else PACKED_OF[kind]


SPLITS = ("train", "validation")


def histogram(lengths: npt.ArrayLike) -> dict[str, int]:
    """How many lengths lie in each power-of-two bucket, keyed by its upper end (inclusive)."""
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    exponents = np.ceil(np.log2(sizes)).astype(np.int64)
    found, counts = np.unique(exponents, return_counts=True)
    return {str(1 << e): n for e, n in zip(found.tolist(), counts.tolist(), strict=True)}
