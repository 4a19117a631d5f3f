"""Plan the packed rows of a split: which samples share a row, and the order of rows."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.core.errors import ConfigError, StageError
from penstock.pack.preference_samples import PreferenceSamples
from penstock.pack.settings import PackSettings
from penstock.pack.sft_samples import SFTSamples
from penstock.rows.bin_plan import (
    Indices,
    PackingPlan,
    greedy,
    join,
    one_per_row,
    sequential,
    wrapped,
)
from penstock.rows.packing.multipack import multipack
from penstock.rows.prepared import PreparedSamples
from penstock.rows.sample_order import rows_generator
from penstock.rows.sources import Sources

Method = Literal["sequential", "multipack", "greedy", "wrapped", "unpacked"]
METHODS: tuple[Method, ...] = ("sequential", "multipack", "greedy", "wrapped", "unpacked")

RowSamples = SFTSamples | PreferenceSamples
"""The samples of a split as documents in rows."""


@dataclass(frozen=True)
class RowPlan:
    """The rows of one split, epoch after epoch."""

    bins: PackingPlan
    """Rows as sample indices; a sample may be in several epochs."""
    epoch_rows: list[int]
    """Number of rows of each epoch."""
    sizes: Indices
    """Number of tokens of every entry of `bins.samples`: a sample, or a piece of one."""
    begins: Indices | None = None
    """`wrapped`: index of every piece's first token in its sample."""


def build_row_samples(samples: PreparedSamples, settings: PackSettings) -> RowSamples:
    """Build the documents of samples by kind."""
    return SFTSamples(samples) if samples.kind == "sft" else PreferenceSamples(samples, settings)


def packing_method(split: str, settings: PackSettings) -> Method:
    """The packing method of a split."""
    if split == "validation" and not settings.eval_sample_packing:
        return "unpacked"
    return settings.sample_packing_method


def plan_rows(form: RowSamples, settings: PackSettings, method: Method) -> RowPlan:
    """Plan the rows of every epoch separately.

    Raises StageError if a sample is longer than a row, except with "wrapped", which cannot be used
    for samples with images or with two completions.
    """
    sizes = form.sample_lengths()
    if method == "wrapped":
        if isinstance(form, PreferenceSamples):
            raise wrapped_error(f"{form.samples.kind} samples")
        if form.samples.has_images:
            raise wrapped_error("samples with images")
        return _plan_wrapped_rows(form, sizes, settings.sample_packing_sequence_len)
    _require_fits(form, sizes, settings.sample_packing_sequence_len)
    epochs: list[PackingPlan] = []
    for number, order in enumerate(form.samples.epochs()):
        bins = _pack_epoch(sizes[order], settings, method, number)
        epochs.append(PackingPlan(order[bins.samples], bins.ends))
    bins = join(epochs)
    return RowPlan(bins, [len(bins) for bins in epochs], sizes[bins.samples])


def count_sources(
    samples: PreparedSamples, row_plan: RowPlan, trained: Indices, capacity: int
) -> list[dict[str, Any]]:
    """Counts of each data set in packed rows: the rows that have a sample of it, the samples (or
    pieces), tokens and trained tokens, and `fill`, its tokens over the `capacity` of all rows.

    `trained` are the trained tokens of each entry of `row_plan.bins.samples`.
    """
    datasets = samples.datasets()[row_plan.bins.samples]
    sources = Sources.from_datasets(datasets, samples.labels())
    row_of = np.repeat(np.arange(len(row_plan.bins)), row_plan.bins.sizes())
    counts: list[dict[str, Any]] = []
    for number, label in enumerate(sources.labels):
        is_own = sources.of_documents == number
        tokens = int(row_plan.sizes[is_own].sum())
        counts.append(
            {
                "label": label,
                "rows": len(np.unique(row_of[is_own])),
                "samples": int(np.count_nonzero(is_own)),
                "tokens": tokens,
                "trained_tokens": int(trained[is_own].sum()),
                "fill": round(tokens / capacity, 6),
            }
        )
    return counts


def _plan_wrapped_rows(form: RowSamples, sizes: Indices, capacity: int) -> RowPlan:
    orders = form.samples.epochs()
    epochs = [wrapped(sizes[order], capacity) for order in orders]
    laid = [
        PackingPlan(order[pieces.bins.samples], pieces.bins.ends)
        for order, pieces in zip(orders, epochs, strict=True)
    ]
    return RowPlan(
        join(laid),
        [len(bins) for bins in laid],
        np.concatenate([pieces.sizes for pieces in epochs]),
        np.concatenate([pieces.begins for pieces in epochs]),
    )


def _pack_epoch(
    lengths: Indices, settings: PackSettings, method: Method, epoch: int
) -> PackingPlan:
    capacity = settings.sample_packing_sequence_len
    if method == "unpacked":
        return one_per_row(len(lengths))
    if method == "sequential":
        return sequential(lengths, capacity)
    if method == "greedy":
        return greedy(lengths, capacity, settings.sample_packing_group_size)
    rng = rows_generator(settings.seed, epoch)
    return multipack(lengths, capacity, settings.sample_packing_group_size, rng)


def wrapped_error(samples: str) -> ConfigError:
    """The error for samples that would be cut and must stay whole."""
    return ConfigError(
        f"data.sample_packing_method is wrapped, which cuts samples, and {samples} "
        "cannot be cut.\n  Write sequential, multipack or greedy."
    )


def _require_fits(form: RowSamples, sizes: Indices, capacity: int) -> None:
    too_long = sizes > capacity
    if not too_long.any():
        return
    samples = form.samples
    section = "datasets" if samples.split == "train" else "test_datasets or data.datasets"
    of = sorted(set(samples.datasets()[too_long].tolist()))
    names = " and ".join(f"data.{section}.{number}.max_seq_len" for number in of)
    # Maximum tokens of each side, so that both fit in a row; they share at least one token.
    subject, limit = "", capacity
    if isinstance(form, PreferenceSamples):
        subject, limit = ", with both answers,", capacity // 2 + 1
    raise StageError(
        f"{too_long.sum()} of {len(sizes)} {samples.split} samples are longer{subject} than a row "
        f"of {capacity} tokens; the longest has {sizes.max()}.\n"
        f"  Set {names} to {limit} to cut them, or data.sample_packing_sequence_len to "
        f"{sizes.max()} or more."
    )
