"""Prepared samples on disk: the memory-mapped files of one split as one sequence."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.config.schema.dataset import Kind
from penstock.core.errors import DamagedFileError
from penstock.core.files import read_json
from penstock.rows.arrow import (
    Tokens,
    Weights,
    flat,
    loss_weights,
    map_batches,
    to_numpy,
    with_columns,
)
from penstock.rows.sample_order import DatasetMixer, Indices, epoch_orders
from penstock.rows.schema import IGNORED, IMAGE_TOKENS, IMAGES, LOSS_WEIGHTS, prepared_schema

PLAN = "plan.json"

SIDES: dict[Kind, tuple[str, ...]] = {
    "sft": ("",),
    "preference": ("chosen_", "rejected_"),
    "kto": ("",),
}
"""Prefixes of the columns `input_ids` and `labels`, by kind of data."""


class TokenLists(NamedTuple):
    """Token lists of consecutive samples, as views of the file. Sample k is
    `offsets[k]:offsets[k + 1]`."""

    input_ids: Tokens
    labels: Tokens
    offsets: Tokens
    weights: Weights | None
    """Loss weight of each label; 0 without a label. None: all labels weigh 1."""


@dataclass(frozen=True)
class Sample:
    """One prepared sample and where it comes from."""

    dataset: int
    """Index of its data set in the config."""
    source: str
    """Label of the data set."""
    slice: str
    """Cache key of its slice, 16 digits."""
    row: int
    """Index of the record in the slice, from 0."""
    sides: dict[str, tuple[Tokens, Tokens]]
    """(input_ids, unshifted labels) by side: "chosen" and "rejected" for a pair, else only ""."""
    desirable: bool | None
    """KTO label: whether the completion is desirable; None for other kinds."""
    score_gap: float | None
    """Score of the chosen completion minus that of the rejected one; None without scores."""
    images: tuple[tuple[bytes, int], ...] = ()
    """(digest, number of tokens) of each image."""


class PreparedSamples:
    """The samples of one split, numbered across its files in the order of plan.json."""

    def __init__(self, folder: Path, split: str) -> None:
        """Memory-map the split of the prepared artifact in `folder`; without files it is empty.

        Raises ArtifactError for a damaged file.
        """
        plan: dict[str, Any] = read_json(folder / PLAN)
        self.split = split
        try:
            self.kind: Kind = plan["kind"]
            self._mixing = DatasetMixer.of_plan(plan)
            entries: list[dict[str, Any]] = plan["splits"][split]
            self._parts = [part for entry in entries for part in entry["parts"]]
            files = [folder / entry["file"] for entry in entries]
            sides = SIDES[self.kind]
            slices: list[dict[str, Any]] = plan.get("slices", [])
            media = {name for part in slices for name in part["tally"].get("media", ())}
            self.processors = sorted({name.partition("/")[0] for name in media})
            """Keys of the image processors of its images."""
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DamagedFileError(
                f"{folder / PLAN} is damaged: it is not a plan of prepared data ({error!r}).\n"
                "  Restore it from a copy, or build it again with --force prepare."
            ) from error
        batches = [batch for file in files for batch in map_batches(file)]
        self._batches = [batch for batch in batches if batch.num_rows]
        self.stored: dict[str, list[TokenLists]] = {
            side.removesuffix("_"): [_token_lists(batch, side) for batch in self._batches]
            for side in sides
        }
        """Token lists of every record batch, by side."""
        sizes = [batch.num_rows for batch in self._batches]
        self.starts: Indices = np.cumsum([0, *sizes], dtype=np.int64)
        """Index of the first sample of each record batch, then the number of samples."""
        self._starts: list[int] = self.starts.tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def lengths(self) -> Indices:
        """Number of tokens of every sample; for a pair, that of its longer side."""
        return np.max([self.side_lengths(side) for side in self.stored], axis=0)

    def side_lengths(self, side: str) -> Indices:
        """Number of tokens of one side of every sample."""
        return self._concat([np.diff(stored.offsets) for stored in self.stored[side]])

    def prompt_lengths(self, side: str) -> Indices:
        """Number of tokens before the first label, of one side of every sample."""
        stored = self.stored[side]
        return self._concat(
            [untrained_prefix_lengths(some.labels, some.offsets) for some in stored]
        )

    def desirable(self) -> npt.NDArray[np.bool_]:
        """KTO labels: whether the completion of each sample is desirable."""
        # Arrow has eight booleans in a byte, of which there is no view.
        columns = [batch.column("desirable").cast(pa.int32()) for batch in self._batches]
        flags = [np.empty(0, np.int32), *(to_numpy(column, np.int32) for column in columns)]
        return np.concatenate(flags).astype(np.bool_)

    def table(self) -> pa.Table:
        """All columns of all samples, memory-mapped (`rows.schema.prepared_schema` lists them)."""
        names = {name for batch in self._batches for name in batch.schema.names}
        schema = prepared_schema(
            self.kind,
            is_scored=self.is_scored,
            has_images=IMAGES in names,
            is_weighted=LOSS_WEIGHTS.name in names,
        )
        return pa.Table.from_batches([with_columns(b, schema) for b in self._batches], schema)

    @property
    def has_images(self) -> bool:
        """Whether some files have columns of images."""
        return any(IMAGES in batch.schema.names for batch in self._batches)

    def images(self, index: int) -> tuple[list[bytes], list[int]]:
        """(digests of the images of a sample, number of image tokens of each)."""
        number, row = self._locate(index)
        batch = self._batches[number]
        if IMAGES not in batch.schema.names:
            return [], []
        return batch.column(IMAGES)[row].as_py(), batch.column(IMAGE_TOKENS)[row].as_py()

    def source_weights(self) -> Weights:
        """Loss weight of the data set of every sample, by which those of its labels are multiplied
        when it is packed."""
        of = np.array([part.get("loss_weight", 1.0) for part in self._parts], dtype=np.float32)
        return np.repeat(of, [part["rows"] for part in self._parts])

    @cached_property
    def is_weighted(self) -> bool:
        """Whether labels differ in their loss weights. Equal ones leave the loss as it is."""
        sources = self.source_weights()
        distinct = set[float]()
        for start, stored in zip(self.starts.tolist(), self.stored.get("", ()), strict=False):
            sizes = np.diff(stored.offsets)
            weights = sources[start : start + len(sizes)]
            if stored.weights is not None:
                products = np.repeat(weights, sizes) * stored.weights
                weights = products[stored.labels != IGNORED]
            distinct.update(np.unique(weights).tolist())
        return len(distinct) > 1 or 0.0 in distinct

    @property
    def is_scored(self) -> bool:
        """Whether pairs have a `score_gap` column."""
        return any("score_gap" in batch.schema.names for batch in self._batches[:1])

    def score_gaps(self) -> npt.NDArray[np.float32]:
        """Chosen score minus rejected score of every pair."""
        columns = [to_numpy(batch.column("score_gap"), np.float32) for batch in self._batches]
        return np.concatenate([np.empty(0, np.float32), *columns])

    def tokens(self, side: str, index: int) -> tuple[Tokens, Tokens]:
        """(input_ids, unshifted labels) of one side of a sample, from 0."""
        number, row = self._locate(index)
        return _token_list(self.stored[side][number], row)

    def trained(self) -> Indices:
        """Number of trained tokens of every sample; for a pair, of both sides together.

        The first token of a list is never trained: no position predicts it.
        """
        sides = [
            self._concat([trained_tokens(stored.labels, stored.offsets) for stored in side])
            for side in self.stored.values()
        ]
        return np.sum(sides, axis=0)

    def datasets(self) -> Indices:
        """Data set index (its place in the config) of every sample."""
        of = np.array([part["dataset"] for part in self._parts], dtype=np.int64)
        return np.repeat(of, [part["rows"] for part in self._parts])

    def labels(self) -> dict[int, str]:
        """Labels of the data sets that have samples, by data set index."""
        numbers, firsts = np.unique(self.datasets(), return_index=True)
        return {
            number: self.sample(first).source
            for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True)
        }

    def epochs(self) -> list[Indices]:
        """Sample indices of every planned epoch, in order.

        One array serves all epochs, except with `mix_strategy: random`. Validation keeps the
        stored order.
        """
        if self.split != "train":
            return [np.arange(len(self), dtype=np.int64)]
        counts = np.bincount(self.datasets(), minlength=len(self._mixing.weights))
        return epoch_orders(counts.tolist(), self._mixing)

    def sample(self, index: int) -> Sample:
        """The sample at `index`, from 0, of any kind. Raises IndexError outside of the split."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, row = self._locate(index)
        batch = self._batches[number]
        ends = np.cumsum([part["rows"] for part in self._parts])
        part = self._parts[int(np.searchsorted(ends, index, side="right"))]
        judged, scored = (name in batch.schema.names for name in ("desirable", "score_gap"))
        return Sample(
            dataset=part["dataset"],
            source=batch.column("source")[row].as_py(),
            slice=part["slice"],
            row=batch.column("row")[row].as_py(),
            sides={name: _token_list(side[number], row) for name, side in self.stored.items()},
            desirable=batch.column("desirable")[row].as_py() if judged else None,
            score_gap=batch.column("score_gap")[row].as_py() if scored else None,
            images=tuple(zip(*self.images(index), strict=True)),
        )

    def _locate(self, index: int) -> tuple[int, int]:
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    @staticmethod
    def _concat(parts: list[Indices]) -> Indices:
        return np.concatenate([np.empty(0, dtype=np.int64), *parts]).astype(np.int64)


def trained_tokens(labels: Tokens, offsets: Tokens) -> Indices:
    """Number of trained labels of each list; the first label of a list is never trained."""
    is_trained = labels != IGNORED
    # Not of empty lists, whose offset is that of the next list's first label.
    is_trained[offsets[:-1][np.diff(offsets) > 0]] = False
    before = np.concatenate([[0], np.cumsum(is_trained, dtype=np.int64)])
    return before[offsets[1:]] - before[offsets[:-1]]


def untrained_prefix_lengths(labels: Tokens, offsets: Tokens | Indices) -> Indices:
    """Number of labels before the first trained one, per list; all of them if none is trained."""
    trained = np.flatnonzero(labels != IGNORED)
    following = np.append(trained, len(labels))[np.searchsorted(trained, offsets[:-1])]
    return (np.minimum(following, offsets[1:]) - offsets[:-1]).astype(np.int64, copy=False)


def _token_lists(batch: pa.RecordBatch, side: str) -> TokenLists:
    ids, offsets = flat(batch.column(f"{side}input_ids"))
    labels, _ = flat(batch.column(f"{side}labels"))
    weights = loss_weights(batch)
    return TokenLists(ids, labels, offsets, weights[0] if weights else None)


def _token_list(stored: TokenLists, row: int) -> tuple[Tokens, Tokens]:
    start, end = stored.offsets[row], stored.offsets[row + 1]
    return stored.input_ids[start:end], stored.labels[start:end]
