"""Source data set of each document of packed rows, stored in a file beside the rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.files import read_json, write_json
from penstock.rows.bin_plan import Indices

FILE = "sources.json"


@dataclass(frozen=True)
class Sources:
    """The data set of each document of a split, in stored order."""

    labels: tuple[str, ...]
    """Labels of the data sets, all distinct."""
    of_documents: Indices
    """Index into `labels` for each document."""

    def write(self, folder: Path) -> None:
        """Write the file to a split's folder."""
        content = {"labels": self.labels, "documents": self.of_documents.tolist()}
        write_json(folder / FILE, content)

    @classmethod
    def read(cls, folder: Path) -> "Sources | None":
        """Read the file of a split's folder; None if there is none (a single data set)."""
        if not (folder / FILE).is_file():
            return None
        content = read_json(folder / FILE)
        return cls(tuple(content["labels"]), np.array(content["documents"], dtype=np.int64))

    @classmethod
    def from_datasets(cls, datasets: Indices, labels: Mapping[int, str]) -> "Sources":
        """Build from the data set index of each document; `labels[d]` is the label of data set d.

        Duplicate labels get the data set index as a suffix (`label#3`).
        """
        numbers, of_documents = np.unique(datasets, return_inverse=True)
        named = [labels[number] for number in numbers.tolist()]
        unique = [
            label if named.count(label) == 1 else f"{label}#{number}"
            for number, label in zip(numbers.tolist(), named, strict=True)
        ]
        return cls(tuple(unique), of_documents.astype(np.int64))
