"""Compare packing methods on prepared samples, without writing rows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.pack.plan_rows import (
    METHODS,
    Method,
    RowPlan,
    RowSamples,
    build_row_samples,
    packing_method,
    plan_rows,
)
from penstock.pack.settings import PackSettings
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.prepared import PreparedSamples
from penstock.rows.schema import SPLITS

DEFAULT_METHODS: tuple[Method, ...] = ("sequential", "multipack", "unpacked")
"""Methods that are always compared."""


@dataclass(frozen=True)
class PackingStats:
    """One packing method on one split."""

    split: str
    method: Method
    chosen: bool
    """Whether it is the configured method."""
    rows: int
    fill: float
    """Tokens divided by the capacity of the rows."""
    padding: float
    """Share of padding if each row is padded separately."""
    bound: int
    """Lower bound on the number of rows."""


def compare(prepared: Path, settings: PackSettings, pad_to_multiple_of: int) -> list[PackingStats]:
    """Compare the methods on every split with samples. Raises as the pack stage."""
    stats: list[PackingStats] = []
    for split in SPLITS:
        samples = PreparedSamples(prepared, split)
        if not len(samples):
            continue
        chosen = packing_method(split, settings)
        form = build_row_samples(samples, settings)
        bound = _lower_bound(form, settings.sample_packing_sequence_len, chosen)
        for method in _methods_to_compare(form, settings.sample_packing_sequence_len, chosen):
            row_plan = plan_rows(form, settings, method)
            totals = _row_lengths(row_plan)
            tokens = int(totals.sum())
            computed = int((-(-totals // pad_to_multiple_of) * pad_to_multiple_of).sum())
            stats.append(
                PackingStats(
                    split=split,
                    method=method,
                    chosen=method == chosen,
                    rows=len(totals),
                    fill=round(tokens / (len(totals) * settings.sample_packing_sequence_len), 6),
                    padding=round(1 - tokens / computed, 6),
                    bound=bound,
                )
            )
    return stats


def _methods_to_compare(form: RowSamples, capacity: int, chosen: Method) -> list[Method]:
    """The default methods and the configured one; only "wrapped" if samples are longer than a row,
    because only it splits samples."""
    is_longer = bool((form.sample_lengths() > capacity).any())
    if chosen == "wrapped" and is_longer:
        return [chosen]
    return [method for method in METHODS if method in (*DEFAULT_METHODS, chosen)]


def _row_lengths(row_plan: RowPlan) -> np.ndarray:
    # No row is empty; for one, reduceat would give the next row's first size instead of 0.
    return np.add.reduceat(row_plan.sizes, row_plan.bins.ends - row_plan.bins.sizes())


def _lower_bound(form: RowSamples, capacity: int, chosen: Method) -> int:
    if chosen == "wrapped":
        sizes = form.sample_lengths()
        return sum(-(-int(sizes[epoch].sum()) // capacity) for epoch in form.samples.epochs())
    sizes = np.minimum(form.sample_lengths(), capacity)
    histograms = (np.bincount(sizes[e], minlength=capacity + 1) for e in form.samples.epochs())
    return sum(fewest_rows(counts, capacity) for counts in histograms)
