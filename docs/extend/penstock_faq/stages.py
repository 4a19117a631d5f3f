"""`data_card`: a page about the packed data, with a histogram of the lengths of its samples."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from penstock.core.cache.package_stage import PackageStage
from penstock.core.cache.stage import Artifact
from penstock.rows.reader import PackedRows


class DataCard(PackageStage):
    """Writes `card.md`, and the numbers of each split as JSON."""

    version: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("pack",)

    bins: int = Field(default=8, gt=0)
    """Bars of the histogram."""

    def run(self, inputs: Mapping[str, Artifact], out: Path) -> dict[str, Any]:
        """Splits that an interrupted attempt has counted are not counted again."""
        card = ["# Packed data"]
        samples: dict[str, int] = {}
        for folder in sorted((inputs["pack"].path / "data").iterdir()):
            file = out / f"{folder.name}.json"
            if not file.exists():
                part = file.with_suffix(".part")
                part.write_text(json.dumps(count_lengths(folder, self.bins)))
                part.replace(file)
            counts = json.loads(file.read_text())
            samples[folder.name] = sum(counts["samples"])
            card.append(f"\n## {folder.name}: {samples[folder.name]:,} samples\n")
            card += [
                f"{first:>7,.0f} to {last:<7,.0f} {count:>9,}"
                for first, last, count in zip(
                    counts["edges"], counts["edges"][1:], counts["samples"], strict=False
                )
            ]
        (out / "card.md").write_text("\n".join(card) + "\n")
        return {"samples": samples}


def count_lengths(folder: Path, bins: int) -> dict[str, list[float]]:
    """Samples by their number of tokens."""
    counts, edges = np.histogram(PackedRows(folder).document_lengths(), bins)
    return {"samples": counts.tolist(), "edges": edges.tolist()}
