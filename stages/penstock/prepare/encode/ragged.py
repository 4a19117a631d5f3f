"""Ragged batches: token sequences, labels and loss weights, concatenated in one buffer each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.rows.prepared import untrained_prefix_lengths
from penstock.rows.schema import IGNORED

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


class LabeledTokens(NamedTuple):
    """Ids and labels of one sequence."""

    ids: Ids
    labels: Ids
    weights: Weights | None = None
    """Loss weight of each label; None: 1."""

    def cut(self, *ranges: slice) -> "LabeledTokens":
        """The tokens in `ranges`, concatenated."""
        weights = self.weights
        return LabeledTokens(
            np.concatenate([self.ids[some] for some in ranges]),
            np.concatenate([self.labels[some] for some in ranges]),
            None if weights is None else np.concatenate([weights[some] for some in ranges]),
        )

    def dense_weights(self) -> Weights:
        """Loss weight of each label; 0 without a label."""
        return dense_weights(self.labels, self.weights)


@dataclass(slots=True, eq=False)
class TokenSequences:
    """Sequence `i` is `ids[offsets[i]:offsets[i + 1]]`; labels likewise, -100 where untrained, and
    loss weights, if some are not 1."""

    ids: Ids
    labels: Ids
    offsets: Offsets
    weights: Weights | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_list(cls, sequences: Sequence[LabeledTokens]) -> "TokenSequences":
        """Concatenate sequences."""
        # np.concatenate refuses an empty list.
        nothing = [np.empty(0, dtype=np.int32)]
        is_weighted = any(sequence.weights is not None for sequence in sequences)
        return cls(
            np.concatenate(nothing + [sequence.ids for sequence in sequences]),
            np.concatenate(nothing + [sequence.labels for sequence in sequences]),
            to_offsets([len(sequence.ids) for sequence in sequences]),
            np.concatenate([sequence.dense_weights() for sequence in sequences])
            if is_weighted
            else None,
        )

    @property
    def lengths(self) -> Offsets:
        """Number of tokens of every sequence."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> LabeledTokens:
        span = slice(self.offsets[index], self.offsets[index + 1])
        weights = None if self.weights is None else self.weights[span]
        return LabeledTokens(self.ids[span], self.labels[span], weights)

    def prompt_lengths(self) -> Offsets:
        """Number of tokens before the first trained one, per sequence; all if none is trained."""
        return untrained_prefix_lengths(self.labels, self.offsets)

    def count_trained(self) -> Offsets:
        """Number of trained tokens of every sequence. The first token is never trained: no position
        predicts it."""
        trained = np.flatnonzero(self.labels != IGNORED)
        starts = np.minimum(self.offsets[:-1] + 1, self.offsets[1:])
        return np.searchsorted(trained, self.offsets[1:]) - np.searchsorted(trained, starts)

    def replace(self, replacements: Mapping[int, LabeledTokens]) -> "TokenSequences":
        """Replace the sequences with the given indices."""
        if not replacements:
            return self
        pieces: list[LabeledTokens] = []
        lengths = self.lengths
        start = 0
        flat = LabeledTokens(self.ids, self.labels, self.weights)
        for index in sorted(replacements):
            pieces += [flat.cut(slice(start, self.offsets[index])), replacements[index]]
            lengths[index] = len(replacements[index].ids)
            start = int(self.offsets[index + 1])
        joined = TokenSequences.from_list([*pieces, flat.cut(slice(start, None))])
        return TokenSequences(joined.ids, joined.labels, to_offsets(lengths), joined.weights)

    def select(self, indices: Sequence[int]) -> "TokenSequences":
        """Select sequences by index; `indices` is sorted."""
        if len(indices) == len(self):
            return self
        nothing = np.empty(0, dtype=np.int32)
        dropped = set(range(len(self))).difference(indices)
        emptied = self.replace(dict.fromkeys(dropped, LabeledTokens(nothing, nothing)))
        offsets = to_offsets(self.lengths[list(indices)])
        return TokenSequences(emptied.ids, emptied.labels, offsets, emptied.weights)

    def weigh(self, factors: Weights) -> "TokenSequences":
        """Multiply the loss weights of every sequence by its factor."""
        if self.weights is None and (factors == 1).all():
            return self
        weights = dense_weights(self.labels, self.weights) * np.repeat(factors, self.lengths)
        is_plain = np.array_equal(weights, self.labels != IGNORED)
        return TokenSequences(self.ids, self.labels, self.offsets, None if is_plain else weights)

    def add_affixes(
        self, before: LabeledTokens, after: LabeledTokens, weights: Weights | None = None
    ) -> "TokenSequences":
        """Add tokens, with their labels, before and after every sequence; labels have the loss
        weight of their sequence in `weights`, or 1."""
        ahead, behind = len(before[0]), len(after[0])
        if not (ahead or behind):
            return self
        offsets = to_offsets(self.lengths + (ahead + behind))
        is_own = np.ones(offsets[-1], dtype=np.bool_)
        positions = [offsets[:-1] + i for i in range(ahead)]
        positions += [offsets[1:] - behind + i for i in range(behind)]
        is_own[np.concatenate(positions)] = False
        arrays: list[Ids] = []
        for own, first, last in zip((self.ids, self.labels), before[:2], after[:2], strict=True):
            values = np.empty(offsets[-1], dtype=np.int32)
            values[is_own] = own
            for position, value in zip(positions, [*first, *last], strict=True):
                values[position] = value
            arrays.append(values)
        weighted = TokenSequences(arrays[0], arrays[1], offsets)
        if self.weights is not None or weights is not None:
            own = np.ones(len(self), np.float32) if weights is None else weights
            weighted.weights = np.repeat(own, weighted.lengths)
            weighted.weights[is_own] = dense_weights(self.labels, self.weights)
        return weighted


def dense_weights(labels: Ids, weights: Weights | None) -> Weights:
    """Loss weight of each label, 1 if `weights` is None; 0 without a label."""
    is_trained = (labels != IGNORED).astype(np.float32)
    return is_trained if weights is None else weights * is_trained


def to_offsets(lengths: npt.ArrayLike) -> Offsets:
    """Offsets of sequences with these lengths."""
    sizes = np.asarray(lengths)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
