"""Compare packing methods on prepared samples, without writing rows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.pack.plan_rows import (
    METHODS,
    Method,
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
        sizes, capacity = form.sample_lengths(), settings.sample_packing_sequence_len
        methods: list[Method] = [
            method for method in METHODS if method in (*DEFAULT_METHODS, chosen)
        ]
        if chosen == "wrapped":
            bound = sum(-(-int(sizes[epoch].sum()) // capacity) for epoch in samples.epochs())
            # Only it splits samples that are longer than a row.
            methods = [chosen] if (sizes > capacity).any() else methods
        else:
            clipped = np.minimum(sizes, capacity)
            counts = [np.bincount(clipped[e], minlength=capacity + 1) for e in samples.epochs()]
            bound = sum(fewest_rows(of_epoch, capacity) for of_epoch in counts)
        for method in methods:
            row_plan = plan_rows(form, settings, method)
            # No row is empty; for one, reduceat would give the next row's first size instead of 0.
            starts = row_plan.bins.ends - row_plan.bins.sizes()
            totals = np.add.reduceat(row_plan.sizes, starts)
            tokens = int(totals.sum())
            computed = int((-(-totals // pad_to_multiple_of) * pad_to_multiple_of).sum())
            stats.append(
                PackingStats(
                    split=split,
                    method=method,
                    chosen=method == chosen,
                    rows=len(totals),
                    fill=round(tokens / (len(totals) * capacity), 6),
                    padding=round(1 - tokens / computed, 6),
                    bound=bound,
                )
            )
    return stats
