"""Per-sample features for selection and statistics, computed once per slice and cached.

A feature is stored beside its slice as `<key16>.<feature>-<digest>.npy`: the key identifies the
samples, the digest the parameters of the feature.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.cache.digest_cache import sha256_file
from penstock.core.cache.record import digest_json
from penstock.core.files import PART, fsync
from penstock.prepare.select.decontaminate import (
    ContaminationIndex,
    common_ngrams,
    count_short_ngrams,
    ngrams_excluding_common,
)
from penstock.prepare.select.exact_duplicates import token_digests
from penstock.prepare.select.groups import column_hashes
from penstock.prepare.select.near_duplicates import SHINGLE, lsh_bands, rows_per_band
from penstock.prepare.slices import TokenizedSlice
from penstock.rows.arrow import flat
from penstock.rows.prepared import trained_tokens

Array = npt.NDArray[Any]

DIGEST_BYTES = 32
"""A feature file ends with the SHA-256 of the preceding bytes."""

VERSION = 1
"""Increase it if a feature with the same name and parameters must have other values."""

TOKENS, TRAINED, LONGEST = 0, 1, 2
"""The rows of `counts`: tokens, trained tokens, and the length of the longest list."""


@dataclass(frozen=True)
class Features:
    """Loads features of slices; `workers` threads compute missing ones."""

    workers: int = 1
    token: bool | None = None
    """Whether the Hugging Face login is used to read records again (None: if there is one)."""

    def counts(self, entries: Sequence[TokenizedSlice]) -> list[Array]:
        """Tokens, trained tokens and length of the samples of each slice, [3, samples]."""
        return self._load_or_compute(
            entries, "counts", None, lambda path: _count_tokens(_iter_batches(path))
        )

    def digests(self, entries: Sequence[TokenizedSlice]) -> list[Array]:
        """Token digests of the samples of each slice, [2, samples]."""
        return self._load_or_compute(
            entries, "tokens", None, lambda path: token_digests(_iter_batches(path))
        )

    def bands(self, entries: Sequence[TokenizedSlice], threshold: float) -> list[Array]:
        """LSH bands of the samples of each slice, [bands, samples]."""
        rows = rows_per_band(threshold)
        return self._load_or_compute(
            entries, "near", [SHINGLE, rows], lambda path: lsh_bands(_iter_batches(path), rows)
        )

    def groups(self, entries: Sequence[TokenizedSlice], column: str) -> list[Array]:
        """Hashes of the column's values of the samples of each slice, [samples]. Raises StageError
        for a record without a value."""
        items = {path: item for item, path, _ in entries}

        def compute(path: Path) -> Array:
            return column_hashes(items[path], path, column, self.token)

        return self._load_or_compute(entries, "groups", column, compute)

    def contaminated(
        self, entries: Sequence[TokenizedSlice], avoid: Sequence[TokenizedSlice], length: int
    ) -> list[Array]:
        """For the samples of each slice, the data set of `avoid` with which they share an n-gram,
        or CLEAN; [samples]."""
        halves = self._load_or_compute(
            avoid,
            "halves",
            length,
            lambda path: count_short_ngrams(_iter_batches(path), length),
            "run",
        )
        common = common_ngrams(halves, sum(tally.rows for _, _, tally in avoid))
        parameters = [length, common.tolist()]
        runs = self._load_or_compute(
            avoid,
            "runs",
            parameters,
            lambda path: ngrams_excluding_common(_iter_batches(path), length, common),
            "run",
        )
        datasets = [item.dataset for item, _, _ in avoid]
        index = ContaminationIndex(list(zip(datasets, runs, strict=True)))
        parameters = [*parameters, [(item.dataset, item.content) for item, _, _ in avoid]]
        return self._load_or_compute(
            entries, "clean", parameters, lambda path: index.match(_iter_batches(path), length)
        )

    def _load_or_compute(
        self,
        entries: Sequence[TokenizedSlice],
        name: str,
        parameters: Any,
        compute: Callable[[Path], Array],
        per: Literal["sample", "run"] = "sample",
    ) -> list[Array]:
        digest = digest_json([VERSION, parameters])[:8]
        num_samples = {path: tally.rows for _, path, tally in entries}

        def of_one(path: Path) -> Array:
            target = path.with_name(f"{path.stem}.{name}-{digest}.npy")
            cached = _read(target)
            if cached is None or (per == "sample" and cached.shape[-1] != num_samples[path]):
                cached = compute(path)
                _publish(cached, target)
            return cached

        # Keyed by path: the slices of a source that is listed twice are computed once.
        with ThreadPoolExecutor(self.workers) as pool:
            cached = dict(zip(num_samples, pool.map(of_one, num_samples), strict=True))
        return [cached[path] for _, path, _ in entries]


def _publish(values: Array, target: Path) -> None:
    # Several processes may write the same feature at the same time.
    part = target.with_name(f"{target.name}.{uuid4().hex}{PART}")
    try:
        # To a stream: np.save appends .npy to a path that ends otherwise.
        with part.open("wb") as sink:
            np.save(sink, values)
        digest = sha256_file(part)
        with part.open("ab") as sink:
            sink.write(bytes.fromhex(digest))
        fsync(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> Array | None:
    """Memory-map a feature; None if the file is missing or damaged, or has no digest."""
    try:
        with path.open("rb") as stream:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        with content, memoryview(content) as view, view[:-DIGEST_BYTES] as values:
            if hashlib.sha256(values).digest() != bytes(view[-DIGEST_BYTES:]):
                return None
        # NumPy ignores the digest after the values.
        # A cache may be shared: a pickle in it would run the code of whoever can write there.
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None


def _iter_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Read the record batches of a slice, one at a time."""
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def _count_tokens(batches: Iterable[pa.RecordBatch]) -> Array:
    parts = [np.empty((3, 0), dtype=np.int32)]
    for batch in batches:
        counts = np.zeros((3, batch.num_rows), dtype=np.int32)
        for name in batch.schema.names:
            if name.endswith("labels"):
                labels, offsets = flat(batch.column(name))
                sizes = np.diff(offsets)
                counts[TOKENS] += sizes
                counts[TRAINED] += trained_tokens(labels, offsets)
                counts[LONGEST] = np.maximum(counts[LONGEST], sizes)
        parts.append(counts)
    return np.concatenate(parts, axis=1)
