"""What every way of packing would make of prepared samples, without writing a row."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.pack.layout import (
    METHODS,
    Layout,
    Method,
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
"""What is always compared."""


@dataclass(frozen=True)
class PackingStats:
    """One way to pack one split."""

    split: str
    method: Method
    chosen: bool
    """Whether it is what the settings say."""
    rows: int
    fill: float
    """The share of the rows' capacity that holds tokens."""
    padding: float
    """The share of padding in what is computed, when each row is padded by itself."""
    bound: int
    """No way needs fewer rows than this."""


def compare(prepared: Path, settings: PackSettings, pad_to_multiple_of: int) -> list[PackingStats]:
    """Every method on every split that has samples. Raises what the pack stage raises."""
    found: list[PackingStats] = []
    for split in SPLITS:
        samples = PreparedSamples(prepared, split)
        if not len(samples):
            continue
        chosen = packing_method(split, settings)
        form = build_row_samples(samples, settings)
        bound = _lower_bound(form, settings.sample_packing_sequence_len, chosen)
        for method in _methods_to_compare(form, settings.sample_packing_sequence_len, chosen):
            layout = plan_rows(form, settings, method)
            totals = _row_lengths(layout)
            tokens = int(totals.sum())
            computed = int((-(-totals // pad_to_multiple_of) * pad_to_multiple_of).sum())
            found.append(
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
    return found


def _methods_to_compare(form: RowSamples, capacity: int, chosen: Method) -> list[Method]:
    """The methods that are usual, and the chosen one; alone, where only it can cut samples that are
    longer than a row."""
    is_longer = bool((form.sample_lengths() > capacity).any())
    if chosen == "wrapped" and is_longer:
        return [chosen]
    return [method for method in METHODS if method in (*DEFAULT_METHODS, chosen)]


def _row_lengths(layout: Layout) -> np.ndarray:
    """The tokens of every row."""
    return np.add.reduceat(layout.sizes, layout.bins.ends - layout.bins.sizes())


def _lower_bound(form: RowSamples, capacity: int, chosen: Method) -> int:
    if chosen == "wrapped":
        sizes = form.sample_lengths()
        return sum(-(-int(sizes[epoch].sum()) // capacity) for epoch in form.samples.epochs())
    sizes = np.minimum(form.sample_lengths(), capacity)
    histograms = (np.bincount(sizes[e], minlength=capacity + 1) for e in form.samples.epochs())
    return sum(fewest_rows(counts, capacity) for counts in histograms)
