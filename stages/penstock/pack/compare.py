"""What every way of packing would make of prepared samples, without writing a row."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.pack.layout import METHODS, Form, Layout, Method, lay_out, packing_method, sample_form
from penstock.pack.settings import PackSettings
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.prepared import PreparedSamples
from penstock.rows.schema import SPLITS

USUAL: tuple[Method, ...] = ("sequential", "multipack", "unpacked")
"""What is always compared."""


@dataclass(frozen=True)
class Figures:
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


def compare(prepared: Path, settings: PackSettings, pad_to_multiple_of: int) -> list[Figures]:
    """Every method on every split that has samples. Raises what the pack stage raises."""
    found: list[Figures] = []
    for split in SPLITS:
        samples = PreparedSamples(prepared, split)
        if not len(samples):
            continue
        chosen = packing_method(split, settings)
        form = sample_form(samples, settings)
        bound = _bound(form, settings.sample_packing_sequence_len, chosen)
        for method in _compared(form, settings.sample_packing_sequence_len, chosen):
            layout = lay_out(form, settings, method)
            totals = _totals(layout)
            tokens = int(totals.sum())
            computed = int((-(-totals // pad_to_multiple_of) * pad_to_multiple_of).sum())
            found.append(
                Figures(
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


def _compared(form: Form, capacity: int, chosen: Method) -> list[Method]:
    """The methods that are usual, and the chosen one; alone, where only it can cut samples that are
    longer than a row."""
    is_longer = bool((form.sizes() > capacity).any())
    if chosen == "wrapped" and is_longer:
        return [chosen]
    return [method for method in METHODS if method in (*USUAL, chosen)]


def _totals(layout: Layout) -> np.ndarray:
    """The tokens of every row."""
    return np.add.reduceat(layout.sizes, layout.bins.ends - layout.bins.sizes())


def _bound(form: Form, capacity: int, chosen: Method) -> int:
    if chosen == "wrapped":
        sizes = form.sizes()
        return sum(-(-int(sizes[epoch].sum()) // capacity) for epoch in form.samples.epochs())
    sizes = np.minimum(form.sizes(), capacity)
    histograms = (np.bincount(sizes[e], minlength=capacity + 1) for e in form.samples.epochs())
    return sum(fewest_rows(counts, capacity) for counts in histograms)
