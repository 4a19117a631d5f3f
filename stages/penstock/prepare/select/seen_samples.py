"""Which samples a model has been trained on, so that those which have come since can be counted.

A sample is known by 64 bits of a digest of its tokens. It stays known when its file is moved,
grows, or is cut otherwise. What is said twice is one sample.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.files import read_json
from penstock.prepare.select.exact_duplicates import token_digests
from penstock.prepare.select.ngrams import Hashes
from penstock.rows.prepared import PLAN
from penstock.rows.reader import map_batches

SAMPLES = "samples.npy"


def _no_hashes() -> Hashes:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True)
class SeenSamples:
    """Samples of training data."""

    digests: Hashes = field(default_factory=_no_hashes)
    """Sorted, each once."""
    files: frozenset[str] = frozenset()
    """Files of prepared data that hold nothing else, by what their plan says of their content."""

    @classmethod
    def read(cls, folder: Path, files: Collection[str]) -> "SeenSamples":
        """What `write` left in the folder."""
        return cls(np.load(folder / SAMPLES, allow_pickle=False), frozenset(files))

    def write(self, folder: Path) -> Path:
        """Put the digests down in the folder."""
        target = folder / SAMPLES
        with target.open("wb") as stream:
            np.save(stream, self.digests)
        return target

    def count_not_in(self, others: "SeenSamples") -> int:
        """How many samples are not among the others."""
        return int((~np.isin(self.digests, others.digests, assume_unique=True)).sum())

    def __or__(self, others: "SeenSamples") -> "SeenSamples":
        return SeenSamples(np.union1d(self.digests, others.digests), self.files | others.files)


def load_seen_samples(prepared: Path, but: Collection[str] = ()) -> SeenSamples:
    """The training samples of prepared data, but for those in files whose content is among `but`.

    Only the others are read.
    """
    plan: dict[str, Any] = read_json(prepared / PLAN)
    entries = [entry for entry in plan["splits"]["train"] if entry["content"] not in but]
    found = [token_digests(map_batches(prepared / entry["file"]))[0] for entry in entries]
    digests = np.unique(np.concatenate([_no_hashes(), *found]))
    return SeenSamples(digests, frozenset(entry["content"] for entry in entries))
