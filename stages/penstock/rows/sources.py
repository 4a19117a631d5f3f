"""Of which data set each document of packed rows is, in a file beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.files import read_json, write_json
from penstock.rows.bin_plan import Indices

FILE = "sources.json"


@dataclass(frozen=True)
class Sources:
    """The data sets of a split's documents, in the order in which these are stored."""

    labels: tuple[str, ...]
    """What people call the data sets; all differ."""
    of_documents: Indices
    """Number of the label of each document."""

    def write(self, folder: Path) -> None:
        """Publish the file in a split's folder."""
        found = {"labels": self.labels, "documents": self.of_documents.tolist()}
        write_json(folder / FILE, found)

    @classmethod
    def read(cls, folder: Path) -> "Sources | None":
        """What the split's folder says; None where all documents are of one data set."""
        if not (folder / FILE).is_file():
            return None
        found = read_json(folder / FILE)
        return cls(tuple(found["labels"]), np.array(found["documents"], dtype=np.int64))

    @classmethod
    def of(cls, datasets: Indices, labels: Mapping[int, str]) -> "Sources":
        """From the data set of each document; `labels[d]` is what people call data set d.

        Where several are called the same, their numbers tell them apart.
        """
        numbers, of_documents = np.unique(datasets, return_inverse=True)
        named = [labels[number] for number in numbers.tolist()]
        told = [
            label if named.count(label) == 1 else f"{label}#{number}"
            for number, label in zip(numbers.tolist(), named, strict=True)
        ]
        return cls(tuple(told), of_documents.astype(np.int64))
