"""Ragged batches: token sequences and labels, concatenated in one buffer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.rows.prepared import untrained_prefix_lengths
from penstock.rows.schema import IGNORED

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]
LabeledTokens = tuple[Ids, Ids]
"""Ids and labels of one sequence."""


@dataclass(slots=True, eq=False)
class TokenSequences:
    """Sequence `i` is `ids[offsets[i]:offsets[i + 1]]`; labels likewise, -100 where untrained."""

    ids: Ids
    labels: Ids
    offsets: Offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_list(cls, sequences: Sequence[LabeledTokens]) -> "TokenSequences":
        """Concatenate sequences."""
        nothing = [np.empty(0, dtype=np.int32)]
        return cls(
            np.concatenate(nothing + [ids for ids, _ in sequences]),
            np.concatenate(nothing + [labels for _, labels in sequences]),
            to_offsets([len(ids) for ids, _ in sequences]),
        )

    @property
    def lengths(self) -> Offsets:
        """Number of tokens of every sequence."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> LabeledTokens:
        place = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[place], self.labels[place]

    def prompt_lengths(self) -> Offsets:
        """Number of tokens before the first trained one, per sequence; all if none is trained."""
        return untrained_prefix_lengths(self.labels, self.offsets)

    def count_trained(self) -> Offsets:
        """Number of trained tokens of every sequence. The first token is never trained: no position
        predicts it."""
        before = to_offsets(self.labels != IGNORED)
        starts = np.minimum(self.offsets[:-1] + 1, self.offsets[1:])
        return before[self.offsets[1:]] - before[starts]

    def replace(self, others: Mapping[int, LabeledTokens]) -> "TokenSequences":
        """Replace the sequences with the given indices."""
        if not others:
            return self
        ids: list[Ids] = []
        labels: list[Ids] = []
        lengths = self.lengths
        start = 0
        for index in sorted(others):
            stop = self.offsets[index]
            ids += [self.ids[start:stop], others[index][0]]
            labels += [self.labels[start:stop], others[index][1]]
            lengths[index] = len(others[index][0])
            start = self.offsets[index + 1]
        return TokenSequences(
            np.concatenate([*ids, self.ids[start:]]),
            np.concatenate([*labels, self.labels[start:]]),
            to_offsets(lengths),
        )

    def select(self, wanted: Sequence[int]) -> "TokenSequences":
        """Select sequences by index; `wanted` is sorted."""
        if len(wanted) == len(self):
            return self
        nothing = np.empty(0, dtype=np.int32)
        dropped = set(range(len(self))).difference(wanted)
        emptied = self.replace(dict.fromkeys(dropped, (nothing, nothing)))
        return TokenSequences(emptied.ids, emptied.labels, to_offsets(self.lengths[list(wanted)]))

    def add_affixes(self, before: LabeledTokens, after: LabeledTokens) -> "TokenSequences":
        """Add tokens, with their labels, before and after every sequence."""
        ahead, behind = len(before[0]), len(after[0])
        if not (ahead or behind):
            return self
        offsets = to_offsets(self.lengths + (ahead + behind))
        is_own = np.ones(offsets[-1], dtype=np.bool_)
        places = [offsets[:-1] + i for i in range(ahead)]
        places += [offsets[1:] - behind + i for i in range(behind)]
        is_own[np.concatenate(places)] = False
        found: list[Ids] = []
        for own, first, last in zip((self.ids, self.labels), before, after, strict=True):
            values = np.empty(offsets[-1], dtype=np.int32)
            values[is_own] = own
            for place, value in zip(places, [*first, *last], strict=True):
                values[place] = value
            found.append(values)
        return TokenSequences(found[0], found[1], offsets)


def to_offsets(lengths: npt.ArrayLike) -> Offsets:
    """Offsets of sequences with these lengths."""
    sizes = np.asarray(lengths)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
