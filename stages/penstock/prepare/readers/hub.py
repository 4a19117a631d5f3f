"""Read Hugging Face Hub data sets at a pinned commit: downloaded rows, or streamed shards."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from datasets import (
    Dataset,
    DownloadMode,
    IterableDataset,
    Json,
    get_dataset_split_names,
    load_dataset,
)
from datasets.exceptions import DatasetsError

from penstock.core.errors import CapabilityError, StageError
from penstock.prepare.readers.columnar import drop_nulls
from penstock.prepare.readers.records import BATCH, Chunk, Value, chunk_records

Pin = Mapping[str, Any]
"""repo, commit, name, split, data_files (see `penstock.core.sources.pin`)."""


# A slice of one split, as `datasets` reads them, without negative numbers.
SLICE = re.compile(r"(?P<name>[\w.-]+)\[(?P<start>\d*):(?P<stop>\d*)(?P<percent>%?)\]")


def open_hub(pin: Pin, token: bool | None) -> Dataset:
    """Open the data set, downloaded once and memory-mapped from the cache.

    Raises StageError if it has no such subset or split, CapabilityError if it cannot be fetched.
    """
    return cast("Dataset", _load(*_load_arguments(pin), token, streaming=False))


def open_stream(pin: Pin, token: bool | None) -> IterableDataset:
    """Open the data set for streaming, without a local copy. Raises as `open_hub`."""
    return cast("IterableDataset", _load(*_load_arguments(pin), token, streaming=True))


def first_rows(pin: Pin, count: int, token: bool | None) -> list[dict[str, Any]]:
    """Up to `count` rows from the start of the split, or of the slice that it names.

    They are streamed without downloading the data set; it is downloaded for slices that cannot be
    streamed, and where streaming fails. Raises as `open_hub`.
    """
    split = pin["split"] or ""
    part = SLICE.fullmatch(split)
    if "[" in split and (part is None or (part["percent"] and part["start"])):
        return list(islice(_iter_hub(pin, token), count))
    try:
        if part is None:
            return list(islice(open_stream(pin, token), count))
        return _first_of_slice(open_stream({**pin, "split": part["name"]}, token), part, count)
    except CapabilityError:
        return list(islice(_iter_hub(pin, token), count))


def _iter_hub(pin: Pin, token: bool | None) -> Iterator[dict[str, Any]]:
    return cast("Iterator[dict[str, Any]]", iter(open_hub(pin, token)))


def _first_of_slice(
    stream: IterableDataset, part: re.Match[str], count: int
) -> list[dict[str, Any]]:
    start, stop = int(part["start"] or 0), int(part["stop"]) if part["stop"] else None
    if stop is None:
        return list(islice(stream, start, start + count))
    if not part["percent"]:
        return list(islice(stream, start, min(start + count, max(start, stop))))
    # Of a split with fewer rows than this, a share of less than `count` rows is read.
    enough = -(-count * 100 // stop) if stop else 0
    rows = list(islice(stream, enough))
    # As `datasets` rounds a share (`_pct_to_abs_closest`).
    return rows[:count] if len(rows) == enough else rows[: round(len(rows) * stop / 100)]


def hub_rows(pin: Pin, span: tuple[int, int], token: bool | None) -> Iterator[Chunk]:
    """Rows `span` of a downloaded data set."""
    data = open_hub(pin, token)
    padded = _struct_columns(data.features)
    for start in range(*span, BATCH):
        columns = data[start : min(start + BATCH, span[1])]
        rows: list[Value] = [
            _drop_padding(dict(zip(columns, values, strict=True)), padded)
            for values in zip(*columns.values(), strict=True)
        ]
        first = start - span[0] + 1
        yield Chunk(rows, range(first, first + len(rows)), list)


def streamed_rows(pin: Pin, span: tuple[int, int], token: bool | None) -> Iterator[Chunk]:
    """The rows of shard `span[0]` of `span[1]`. Raises as `open_hub` if streaming fails."""
    # `span[1]` is the number of its shards, so each index is one of them, and no other is fetched.
    shard = open_stream(pin, token).shard(num_shards=span[1], index=span[0])
    padded = _struct_columns(shard.features)
    with _Fetching(pin):
        yield from chunk_records(_drop_padding(row, padded) for row in shard)


def _struct_columns(features: Mapping[str, Any] | None) -> list[str]:
    """Struct columns, in which Arrow fills absent members with nulls."""
    return [name for name, feature in (features or {}).items() if _is_struct(feature)]


def _is_struct(feature: Any) -> bool:
    """Whether a feature is a struct. Json features are not: they keep their own nulls."""
    if isinstance(feature, dict):
        return not any(isinstance(part, Json) for part in cast("dict[str, Any]", feature).values())
    inner = getattr(feature, "feature", None)
    return inner is not None and _is_struct(inner)


def _drop_padding(row: dict[str, Any], padded: Sequence[str]) -> dict[str, Any]:
    return {**row, **{name: drop_nulls(row[name]) for name in padded}}


def _load_arguments(pin: Pin) -> tuple[Any, ...]:
    files = pin["data_files"]
    return pin["repo"], pin["commit"], pin["name"], pin["split"], tuple(files) if files else None


# Opened once per process.
@lru_cache(maxsize=8)
def _load(
    repo: str,
    commit: str,
    name: str | None,
    split: str | None,
    data_files: tuple[str, ...] | None,
    token: bool | None,
    *,
    streaming: bool,
) -> Any:
    """Without a split: `train`, or the only split."""
    part: dict[str, Any] = {
        "revision": commit,
        "data_files": list(data_files) if data_files else None,
        "download_mode": DownloadMode.REUSE_DATASET_IF_EXISTS,
        "token": token,
    }
    with _Fetching({"repo": repo, "commit": commit}):
        try:
            return load_dataset(repo, name, split=split or "train", streaming=streaming, **part)
        # What datasets raises for a split that is not there.
        except ValueError:
            splits = [] if split else get_dataset_split_names(repo, name, **part)
            # If `train` is there, the error is about something else.
            if len(splits) != 1 or splits == ["train"]:
                raise
            return load_dataset(repo, name, split=splits[0], streaming=streaming, **part)


class _Fetching:
    def __init__(self, pin: Pin) -> None:
        self._what = f"{pin['repo']} at {pin['commit'][:12]}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ValueError):
            raise StageError(
                f"{self._what} cannot be loaded: {error}\n"
                "  Set name, split and data_files to ones that the data set has."
            ) from error
        if isinstance(error, OSError | RuntimeError | DatasetsError):
            raise CapabilityError(
                f"{self._what} cannot be fetched from the hub: {error}\n"
                "  Go online or log in (hf auth login), or give a local path."
            ) from error
