"""The unit of preparing: a run of consecutive records of one source, named by its content.

A slice's key holds everything that decides its samples: the tokenizer, the data set's settings, and
the digests and record ranges of what it reads. Seeds, shuffles and validation are not in it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import StageError
from penstock.core.stage import Source, digest_of, short
from penstock.prepare.read import count_records, open_hub, read_builtin
from penstock.prepare.settings import DatasetSettings, PrepareSettings

FORMAT = 1
"""Raised when the same records and settings must give other samples."""

Role = Literal["train", "validation"]


@dataclass(frozen=True)
class Piece:
    """Records `start` to `stop` (to the end: None) of one file, hub data set or built-in set."""

    kind: Literal["files", "hub", "builtin"]
    name: str
    pin: dict[str, Any]
    path: Path | None = None
    start: int = 0
    stop: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Identity: where the file lies is left out."""
        return {"name": self.name, "pin": self.pin, "start": self.start, "stop": self.stop}


@dataclass(frozen=True)
class Slice:
    """Consecutive records of data set number `dataset` of the sources of its role."""

    key: str
    role: Role
    dataset: int
    label: str
    settings: DatasetSettings
    columns: tuple[str, ...] | None
    pieces: tuple[Piece, ...]

    @property
    def file(self) -> str:
        """What its Arrow file is called."""
        return f"slice-{self.key}.arrow"


def plan_slices(
    settings: PrepareSettings,
    train: Sequence[Source],
    validation: Sequence[Source],
    tokenizer: Source,
) -> list[Slice]:
    """All slices, training first, in the order of the sources and of their records."""
    pieces = [_pieces(source) for source in train]
    if settings.num_dataset_shards_to_save is None:
        runs = [[(piece,) for piece in of_source] for of_source in pieces]
    else:
        runs = _cut(pieces, settings.datasets, settings.num_dataset_shards_to_save)
    planned = [
        _slice("train", index, train[index], settings.datasets[index], settings, tokenizer, run)
        for index, of_source in enumerate(runs)
        for run in of_source
    ]
    planned += [
        _slice("validation", index, source, its, settings, tokenizer, (piece,))
        for index, (source, its) in enumerate(zip(validation, settings.test_datasets, strict=True))
        for piece in _pieces(source)
    ]
    return _told_apart(planned)


def label_of(source: Source) -> str:
    """What people call the data set."""
    pin = source.pin
    return str(pin[{"files": "label", "hub": "repo", "builtin": "name"}[pin["kind"]]])


def _slice(
    role: Role,
    dataset: int,
    source: Source,
    its: DatasetSettings,
    settings: PrepareSettings,
    tokenizer: Source,
    pieces: tuple[Piece, ...],
) -> Slice:
    label = label_of(source)
    key = digest_of(
        {
            "format": FORMAT,
            "tokenizer": tokenizer.key,
            "settings": its.model_dump(mode="json"),
            "columns": settings.select_columns,
            "label": label,
            "pieces": [piece.as_json() for piece in pieces],
        }
    )
    return Slice(key, role, dataset, label, its, settings.select_columns, pieces)


def _told_apart(slices: list[Slice]) -> list[Slice]:
    """The same records listed again (to weigh them more) have keys of their own."""
    seen: Counter[str] = Counter()
    found: list[Slice] = []
    for item in slices:
        again = seen[item.key]
        seen[item.key] += 1
        key = digest_of([item.key, again]) if again else item.key
        found.append(replace(item, key=short(key)))
    return found


def _pieces(source: Source) -> list[Piece]:
    pin = dict(source.pin)
    if pin["kind"] == "files":
        return [
            Piece("files", file["name"], {"sha256": file["sha256"]}, path)
            for file, path in zip(pin["files"], source.paths, strict=True)
        ]
    return [Piece(pin["kind"], label_of(source), pin)]


def _cut(
    pieces: list[list[Piece]], datasets: Sequence[DatasetSettings], wanted: int
) -> list[list[tuple[Piece, ...]]]:
    """Exactly `wanted` runs of records in all, each source having its share of them."""
    counts = [
        [_count(piece, its) for piece in of_source]
        for of_source, its in zip(pieces, datasets, strict=True)
    ]
    shares = _shares([sum(of_source) for of_source in counts], wanted)
    return [
        _runs(of_source, of_counts, share)
        for of_source, of_counts, share in zip(pieces, counts, shares, strict=True)
    ]


def _shares(totals: list[int], wanted: int) -> list[int]:
    """`wanted` parts among sources by their size, at least one each, largest remainder first."""
    if wanted < len(totals):
        raise StageError(
            f"{len(totals)} data sets cannot be saved in {wanted} slices, for a slice holds one.\n"
            f"  Set data.num_dataset_shards_to_save to {len(totals)} or more."
        )
    spare = wanted - len(totals)
    exact = [spare * total / max(1, sum(totals)) for total in totals]
    shares = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(totals)), key=lambda i: (int(exact[i]) - exact[i], i))
    for index in by_remainder[: wanted - sum(shares)]:
        shares[index] += 1
    return shares


def _runs(pieces: list[Piece], counts: list[int], share: int) -> list[tuple[Piece, ...]]:
    total = sum(counts)
    runs: list[tuple[Piece, ...]] = []
    for number in range(share):
        first, last = total * number // share, total * (number + 1) // share
        run: list[Piece] = []
        start = 0
        for piece, count in zip(pieces, counts, strict=True):
            low, high = max(first - start, 0), min(last - start, count)
            if low < high:
                run.append(replace(piece, start=low, stop=high))
            start += count
        runs.append(tuple(run))
    return runs


def _count(piece: Piece, its: DatasetSettings) -> int:
    if piece.path:
        return count_records(piece.path, piece.name, its.ds_type)
    if piece.kind == "builtin":
        return sum(1 for _ in read_builtin(piece.name))
    pin = piece.pin
    return len(open_hub(pin["repo"], pin["commit"], pin["name"], pin["split"], pin["data_files"]))
