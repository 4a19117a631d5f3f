"""Digests of the samples that a model was trained on, to count new samples since then.

A sample is identified by 64 bits of a digest of its tokens, independent of its file and slice.
Duplicates count as one sample.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.files import read_json
from penstock.prepare.select.exact_duplicates import token_digests
from penstock.prepare.select.ngrams import Hashes
from penstock.rows.arrow import map_batches
from penstock.rows.prepared import PLAN

SAMPLES = "samples.npy"


def _no_hashes() -> Hashes:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True)
class SeenSamples:
    """Digests of training samples."""

    digests: Hashes = field(default_factory=_no_hashes)
    """Sorted, without duplicates."""
    files: frozenset[str] = frozenset()
    """Content digests (from plan.json) of files all of whose samples are in `digests`."""

    @classmethod
    def read(cls, folder: Path, files: Collection[str]) -> "SeenSamples":
        """Read the file that `write` wrote."""
        return cls(np.load(folder / SAMPLES, allow_pickle=False), frozenset(files))

    def write(self, folder: Path) -> Path:
        """Write the digests to the folder."""
        target = folder / SAMPLES
        with target.open("wb") as stream:
            np.save(stream, self.digests)
        return target

    def count_not_in(self, previous: "SeenSamples") -> int:
        """Number of samples that are not in `previous`."""
        return int((~np.isin(self.digests, previous.digests, assume_unique=True)).sum())

    def __or__(self, added: "SeenSamples") -> "SeenSamples":
        return SeenSamples(np.union1d(self.digests, added.digests), self.files | added.files)


def load_seen_samples(prepared: Path, but: Collection[str] = ()) -> SeenSamples:
    """The training samples of prepared data, except those in files with content digests in `but`,
    which are not read.
    """
    plan: dict[str, Any] = read_json(prepared / PLAN)
    entries = [entry for entry in plan["splits"]["train"] if entry["content"] not in but]
    file_digests = [token_digests(map_batches(prepared / entry["file"]))[0] for entry in entries]
    digests = np.unique(np.concatenate([_no_hashes(), *file_digests]))
    return SeenSamples(digests, frozenset(entry["content"] for entry in entries))
