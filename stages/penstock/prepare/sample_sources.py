"""Source of each stored sample, from plan.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.prepare.plan import SECTIONS
from penstock.rows.sample_order import Indices


@dataclass(frozen=True)
class DataSource:
    """One source of the configuration."""

    role: str
    dataset: int
    """Index among the sources of its role, from 0."""
    label: str
    """Display name."""

    @property
    def section(self) -> str:
        """Its section in the config."""
        return f"data.{SECTIONS[self.role]}.{self.dataset}"


@dataclass(frozen=True)
class SplitSources:
    """The sources of the samples of one split."""

    sources: tuple[DataSource, ...]
    """In the order of their first samples."""
    source_indices: Indices
    """Index into `sources` of every sample of the split."""
    counts: tuple[Mapping[str, int], ...]
    """`rows`, `tokens` and `trained_tokens` of every source in the split."""


def split_sources(plan: Mapping[str, Any], split: str) -> SplitSources:
    """The sources of a split. Held-out validation samples belong to their training source."""
    of_slice = {
        item["key"]: DataSource(item["role"], item["dataset"], item["label"])
        for item in plan["slices"]
    }
    counts: dict[DataSource, dict[str, int]] = {}
    runs: list[tuple[DataSource, int]] = []
    for part in (part for entry in plan["splits"][split] for part in entry["parts"]):
        origin = of_slice[part["slice"]]
        held = counts.setdefault(origin, {"rows": 0, "tokens": 0, "trained_tokens": 0})
        for name in held:
            held[name] += part[name]
        runs.append((origin, part["rows"]))
    index_by_origin = {origin: index for index, origin in enumerate(counts)}
    of = np.array([index_by_origin[origin] for origin, _ in runs], dtype=np.int64)
    return SplitSources(
        tuple(counts), np.repeat(of, [rows for _, rows in runs]), tuple(counts.values())
    )
