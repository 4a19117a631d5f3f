"""Data samples of the report: decoded samples with their loss mask, and a length histogram.

Both are taken from the packed rows, which are the training data. They are stored in the run folder
at the start, because rows may be pruned, and are not part of the run's result.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.cache.manifest import listed_files
from penstock.core.files import read_json, write_json
from penstock.rows.decoding import Decoder
from penstock.rows.reader import SHARDS, PackedRows, Row, Tokens
from penstock.rows.schema import IGNORED, SPLITS
from penstock.rows.shared_prefix import PER_SAMPLE, PrefixSharing
from penstock.train.launch.job import DATA_SAMPLES
from penstock.train.length_histogram import length_histogram
from penstock.train.masked_text import masked_pieces

MOST_TOKENS = 400
"""Maximum number of tokens shown per text."""
BEGINNING = 100
"""How many of them are the first tokens, if the trained tokens start later than that."""
BEFORE_TRAINED = 50
"""Tokens shown before the first trained token in that case."""

Mask = npt.NDArray[np.bool_]

Part = dict[str, Any]
"""`name`, `tokens`, `trained_tokens` and `spans`: lists of "trained", "untrained" or "left out" and
a text, which for left-out tokens is their number."""


def keep_shown_data(
    out: Path, packed: Path, epoch_rows: Sequence[int], number: int, decoder: Callable[[], Decoder]
) -> None:
    """Write both to the run folder: `number` samples, evenly spaced over the first epoch.

    `packed` is the packed artifact; the first epoch has `epoch_rows[0]` of its training rows, or
    all. The decoder is only loaded if there are samples. Raises the errors of reading rows and
    decoding.
    """
    lengths: dict[str, Any] = {}
    samples: list[list[Part]] = []
    for split in SPLITS:
        folder = packed / "data" / split
        if not listed_files(folder, SHARDS):
            continue
        rows = PackedRows(folder)
        first_epoch = epoch_rows[0] if split == "train" and epoch_rows else len(rows)
        ends = rows.documents()[:first_epoch].cumsum()
        if not len(ends):
            continue
        lengths[split] = length_histogram(rows.document_lengths()[: ends[-1]])
        if split == "train" and number:
            decode = decoder()
            spread = _spread(ends, number)
            samples = [list(_parts(rows.row(row), document, decode)) for row, document in spread]
    write_json(out / DATA_SAMPLES, {"lengths": lengths, "samples": samples})


def kept_shown_data(out: Path) -> dict[str, Any]:
    """Read `lengths` by split and `samples`; both empty if the run stored none."""
    path = out / DATA_SAMPLES
    return read_json(path) if path.is_file() else {"lengths": {}, "samples": []}


def _spread(ends: npt.NDArray[np.int64], number: int) -> Iterator[tuple[int, int]]:
    """(row, document index) of evenly spaced documents. `ends` is the cumulative document count per
    row."""
    total = int(ends[-1])
    # The middles of `number` equal intervals.
    for document in sorted({(2 * index + 1) * total // (2 * number) for index in range(number)}):
        row = int(np.searchsorted(ends, document, side="right"))
        yield row, document - (int(ends[row - 1]) if row else 0)


def _parts(row: Row, document: int, decoder: Decoder) -> Iterator[Part]:
    """A plain document as a whole; of a preference sample, the prompt and the completions."""
    if row.branching is None:
        start = int(row.lengths[:document].sum())
        end = start + int(row.lengths[document])
        ids, labels = row.input_ids[start:end], row.labels[start:end]
        # Labels of packed rows are shifted by one, and the last token of a document has none.
        yield _part("", ids, _shifted(labels)[:-1], decoder)
        return
    branching = row.branching
    first = document * _branches_per_document(branching) // PER_SAMPLE * PER_SAMPLE
    sequences = [_sequence(row, branching, branch) for branch in (first, first + 1)]
    begins = [int(np.argmax(mask)) for _, mask in sequences]
    ids, mask = sequences[0]
    yield _part("prompt", ids[: begins[0]], mask[: begins[0]], decoder)
    names = ("chosen answer", "rejected answer")
    if branching.desirable:
        is_desirable = branching.desirable[first // PER_SAMPLE]
        names = ("desirable answer" if is_desirable else "undesirable answer",)
    for name, (ids, mask), begin in zip(names, sequences, begins, strict=False):
        yield _part(name, ids[begin:], mask[begin:], decoder)


def _branches_per_document(branching: PrefixSharing) -> int:
    """The two completions of a sample share a prompt, or are documents of their own."""
    return len(branching.branches) // len(branching.prompts)


def _sequence(row: Row, branching: PrefixSharing, branch: int) -> tuple[Tokens, Mask]:
    """The tokens of a prompt and one completion, and the loss mask."""
    per_document = _branches_per_document(branching)
    document = branch // per_document
    begin = sum(branching.documents()[:document])
    shared = branching.prompts[document]
    start = begin + shared + sum(branching.branches[document * per_document : branch])
    tokens = slice(start, start + branching.branches[branch])
    labels = row.labels[tokens]
    prompt = row.input_ids[begin : begin + shared]
    # The last token of a completion is only present as a label.
    ids = np.concatenate([prompt, row.input_ids[tokens], labels[-1:][labels[-1:] != IGNORED]])
    mask = np.concatenate([np.zeros(shared, np.bool_), _shifted(labels)])
    return ids, mask[: len(ids)]


def _shifted(labels: Tokens) -> Mask:
    """Loss mask of the tokens, one longer than the labels, because labels are shifted by one."""
    return np.concatenate([[False], labels != IGNORED])


def _part(name: str, ids: Tokens, mask: Mask, decoder: Decoder) -> Part:
    spans = list(_spans(ids, mask, decoder))
    texts = iter(masked_pieces([text for kind, text in spans if kind != "left out"]))
    return {
        "name": name,
        "tokens": len(ids),
        "trained_tokens": int(mask.sum()),
        "spans": [[kind, text if kind == "left out" else next(texts)] for kind, text in spans],
    }


def _spans(ids: Tokens, mask: Mask, decoder: Decoder) -> Iterator[tuple[str, str]]:
    shown = 0
    for start, end in _windows(mask):
        if start > shown:
            yield "left out", f"{start - shown:,}"
        span_mask = mask[start:end]
        ends = [*(np.flatnonzero(span_mask[1:] != span_mask[:-1]) + 1).tolist(), len(span_mask)]
        for stop, text in zip(ends, decoder.pieces(ids[start:end].tolist(), ends), strict=True):
            yield "trained" if span_mask[stop - 1] else "untrained", text
        shown = end
    if shown < len(ids):
        yield "left out", f"{len(ids) - shown:,}"


def _windows(mask: Mask) -> list[tuple[int, int]]:
    """The token ranges to show: the beginning, and the first trained tokens."""
    size = len(mask)
    if not size:
        return []
    first = int(np.argmax(mask)) if mask.any() else 0
    if size <= MOST_TOKENS or first < MOST_TOKENS - BEFORE_TRAINED:
        return [(0, min(size, MOST_TOKENS))]
    start = first - BEFORE_TRAINED
    return [(0, BEGINNING), (start, min(size, start + MOST_TOKENS - BEGINNING))]
