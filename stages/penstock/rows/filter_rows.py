"""Select some of the samples of packed preference rows."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np

from penstock.rows.reader import Row, RowImage
from penstock.rows.shared_prefix import PER_SAMPLE, PrefixSharing


def iter_new_samples(rows: Iterable[Row], digests: Collection[bytes]) -> Iterator[Row]:
    """Yield the rows with only the samples that are not in `digests` and in no earlier row."""
    seen_digests = set(digests)
    for row in rows:
        assert row.branching is not None
        new = set(row.branching.samples) - seen_digests
        if part := select_samples(row, new):
            yield part
        seen_digests |= new


def select_samples(row: Row, digests: Collection[bytes]) -> Row | None:
    """The row with only its `digests` samples; None if it has none of them."""
    row_branching = row.branching
    assert row_branching is not None
    chosen = [index for index, sample in enumerate(row_branching.samples) if sample in digests]
    if len(chosen) == len(row_branching.samples):
        return row
    if not chosen:
        return None
    documents_per_sample = len(row_branching.prompts) // len(row_branching.samples)
    documents = [
        sample * documents_per_sample + index
        for sample in chosen
        for index in range(documents_per_sample)
    ]
    branches = [sample * PER_SAMPLE + index for sample in chosen for index in range(PER_SAMPLE)]
    ends = np.cumsum(row.lengths)
    tokens = np.concatenate(
        [np.arange(ends[number] - row.lengths[number], ends[number]) for number in documents]
    )
    branching = PrefixSharing(
        prompts=tuple(row_branching.prompts[number] for number in documents),
        branches=tuple(row_branching.branches[number] for number in branches),
        samples=tuple(row_branching.samples[sample] for sample in chosen),
        desirable=tuple(row_branching.desirable[sample] for sample in chosen)
        if row_branching.desirable
        else (),
        score_gaps=tuple(row_branching.score_gaps[sample] for sample in chosen)
        if row_branching.score_gaps
        else (),
        image_counts=tuple(row_branching.image_counts[n] for n in documents)
        if row_branching.image_counts
        else (),
    )
    return replace(
        row,
        input_ids=row.input_ids[tokens],
        labels=row.labels[tokens],
        lengths=row.lengths[documents],
        branching=branching,
        images=tuple(image for number in documents for image in _images(row, number)),
    )


def _images(row: Row, document: int) -> tuple[RowImage, ...]:
    assert row.branching is not None
    counts = row.branching.image_counts
    if not counts:
        return ()
    first = sum(counts[:document])
    return row.images[first : first + counts[document]]
