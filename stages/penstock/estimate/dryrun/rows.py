"""Rows for a dry run: random tokens in documents of given lengths."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.validate_layout import micro_batch_padding
from penstock.rows.collate import MicroBatch, collate
from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock.rows.shared_prefix import PER_SAMPLE, PrefixSharing

DOCUMENT_LENGTHS = (200, 1500)
"""Lengths of documents if those of the data are not known, uniformly distributed."""

PROMPT_SHARE = 3
"""A prompt is the third part of its document."""


def synthetic_step(run: RunConfig, count: int, *, seed: int = 0) -> list[MicroBatch]:
    """`count` micro-batches of full rows, of the kind of data that the run trains on."""
    rng = np.random.default_rng(seed)
    rows_per_batch = run.train.rows_at_once
    groups = [
        [_row(run, index * rows_per_batch + offset, rng) for offset in range(rows_per_batch)]
        for index in range(count)
    ]
    laid = collate(groups, pad_to_multiple_of=micro_batch_padding(run.data, run.train))
    return laid.pin_memory().micro_batches()


def reference_log_probs(run: RunConfig, batch: MicroBatch) -> torch.Tensor | None:
    """Reference log-probs of the completions, [D, A], in host memory; None if none are needed."""
    if run.train.objective != "preference" or not run.preference.has_reference:
        return None
    assert batch.branching
    return torch.zeros(len(batch.branching.samples), PER_SAMPLE)


def document_lengths(row_length: int) -> list[int]:
    """Lengths of the documents of such a row."""
    return list(_lengths(row_length, np.random.default_rng(0)))


def mean_pairs_per_token(documents: Sequence[int], window: int | None = None) -> float:
    """Mean number of keys that a query attends to in documents of these lengths; `window`: at most
    its own key and so many before it."""
    lengths = np.array(documents, dtype=np.float64)
    most = lengths if window is None else np.minimum(lengths, window + 1)
    return float((most * (most + 1) / 2 + (lengths - most) * most).sum() / lengths.sum())


def _row(run: RunConfig, number: int, rng: np.random.Generator) -> Row:
    ids = rng.integers(0, 256, run.data.row_length).astype(np.int32)
    lengths = np.array(list(_lengths(len(ids), rng)), dtype=np.int32)
    if run.train.objective == "preference":
        return _preference_row(run, number, ids, lengths)
    # Every token is trained, as in pretraining: the most that the loss may need.
    return Row(ids, ids, lengths, number)


def _preference_row(run: RunConfig, number: int, ids: np.ndarray, lengths: np.ndarray) -> Row:
    """One sample in each document; without shared prompts, in each two documents."""
    labels, halves = ids.copy(), lengths // PER_SAMPLE
    if run.data.shares_prompts:
        prompts = lengths // PROMPT_SHARE
        halves = (lengths - prompts) // PER_SAMPLE
        branches = np.stack([halves, lengths - prompts - halves], 1)
        masked = prompts
    else:
        branches = np.stack([halves, lengths - halves], 1)
        lengths = branches.ravel()
        prompts = np.zeros_like(lengths)
        masked = lengths // PROMPT_SHARE
    for start, size in zip(lengths.cumsum() - lengths, masked, strict=True):
        labels[start : start + size] = IGNORED
    is_judged = run.preference.loss_type == "kto"
    sharing = PrefixSharing(
        prompts=tuple(prompts.tolist()),
        branches=tuple(branches.ravel().tolist()),
        samples=(b"",) * len(branches),
        desirable=(True,) * len(branches) if is_judged else (),
        score_gaps=(1.0,) * len(branches) if run.preference.offset_alpha else (),
    )
    return Row(ids, labels, lengths, number, sharing)


def _lengths(row_length: int, rng: np.random.Generator) -> Iterator[int]:
    least, most = DOCUMENT_LENGTHS
    tokens_left = row_length
    while tokens_left:
        length = int(rng.integers(least, most))
        # No document is too short for a prompt with two completions.
        length = tokens_left if tokens_left - length < PROMPT_SHARE * PER_SAMPLE else length
        yield length
        tokens_left -= length
