"""Packed rows to micro-batches of tensors. T tokens in a micro-batch, padding included."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch

from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock.rows.shared_prefix import PrefixSharing, Span

PADDING = 1024
"""Tokens of a document of padding, at most."""

PadTo = int | Literal["own", "longest"]
"""How long a micro-batch is: as long as itself, as the longest one of its step, or so many tokens;
rounded up to a multiple."""


@dataclass(frozen=True)
class MicroBatch:
    """Documents one after another, with no batch dimension.

    `lengths` say where documents end and sum to T; padding is last, in documents of its own.
    `labels_T` are shifted already and -100 where nothing is trained, in all of the padding too.
    """

    input_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    labels_T: torch.Tensor  # noqa: N815 - T names the dimension
    position_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    lengths: tuple[int, ...]
    num_tokens: int
    """Tokens without padding."""
    num_trained: int
    rows: tuple[tuple[int, int], ...]
    """Number and tokens of each row, in order."""
    branching: PrefixSharing | None = None
    """Of all documents but the padding; None where they are plain ones, or there are none."""

    def branch_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        """The branch that each token is of, of all T, numbered over the micro-batch; -1 for what
        branches share, and for padding. int64, of the whole micro-batch."""
        branch = np.full(sum(self.lengths), -1, dtype=np.int64)
        if self.branching:
            found = self.branching.branch_of_tokens()
            branch[: len(found)] = found
        return torch.from_numpy(branch)

    def prompt_targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels of prompts, which are not among `labels_T`: each prompt token is the target of the
        one before it, once per sample. int64, of the whole micro-batch.

        Returns:
            labels_T: -100 outside of prompts.
            sample_T: the number of each such label's sample; -1 elsewhere.
        """
        labels, sample = (np.full(sum(self.lengths), fill, np.int64) for fill in (IGNORED, -1))
        if self.branching:
            found = self.branching.sample_of_prompt_tokens(self.labels_T.numpy())
            places = np.flatnonzero(found >= 0)
            labels[places] = self.input_ids_T.numpy()[places + 1]
            sample[places] = found[places]
        return torch.from_numpy(labels), torch.from_numpy(sample)

    def spans(self) -> list[Span] | None:
        """Which tokens later ones see how long; None where all see what is before them in their
        documents."""
        if not (self.branching and self.branching.is_shared):
            return None
        ends = list(accumulate(self.lengths))[len(self.branching.prompts) - 1 :]
        return self.branching.spans() + [Span(*pair, pair[1]) for pair in pairwise(ends)]

    def places(self) -> torch.Tensor:
        """Which token of the packed rows each is, of all T: number of its row in the high half,
        place in the row in the low one; -1 for padding. int64, of the whole micro-batch."""
        places = np.full(sum(self.lengths), -1, dtype=np.int64)
        start = 0
        for number, size in self.rows:
            places[start : start + size] = (number << 32) + np.arange(size)
            start += size
        return torch.from_numpy(places)


@dataclass(frozen=True)
class _Part:
    """What a micro-batch is besides tensors."""

    lengths: tuple[int, ...]
    num_tokens: int
    num_trained: int
    rows: tuple[tuple[int, int], ...]
    branching: PrefixSharing | None


@dataclass(frozen=True)
class CollatedStep:
    """The micro-batches of a step in one piece of memory: [3, T of all], int64.

    One piece passes between processes, and is pinned, at the cost of one.
    """

    values: torch.Tensor
    parts: tuple[_Part, ...]

    def pin_memory(self) -> "CollatedStep":
        """The same in page-locked memory, from which a GPU copies while it computes."""
        return replace(self, values=self.values.pin_memory())

    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches, as views."""
        found: list[MicroBatch] = []
        start = 0
        for part in self.parts:
            size = sum(part.lengths)
            ids, labels, positions = self.values.narrow(1, start, size).unbind()
            found.append(MicroBatch(ids, labels, positions, **vars(part)))
            start += size
        return found


def collate(
    groups: Sequence[Sequence[Row]],
    *,
    pad_to_multiple_of: int,
    pad_to: PadTo = "own",
    pad_token_id: int = 0,
) -> CollatedStep:
    """One micro-batch of each group of rows: laid end to end and padded.

    No rows give nothing but padding, one whole multiple at least. Labels are taken as they are,
    never shifted again. Documents keep their true lengths here and on disk: an attention that needs
    them aligned pads them after this, and one packed artifact serves every layout.

    Raises:
        ValueError: for rows whose documents are not all of their tokens, or that are longer than
            the number `pad_to`.
    """
    documents = [_documents(rows) for rows in groups]
    totals = _totals([sum(lengths) for lengths in documents], pad_to_multiple_of, pad_to)
    for lengths, total in zip(documents, totals, strict=True):
        lengths += _documents_of_padding(total - sum(lengths))
    values = np.empty((3, sum(totals)), dtype=np.int64)
    counting = np.arange(max(totals, default=0))
    parts: list[_Part] = []
    start = 0
    for rows, lengths, total in zip(groups, documents, totals, strict=True):
        ids, labels, positions = values[:, start : start + total]
        used = trained = 0
        for row in rows:
            end = used + len(row.input_ids)
            ids[used:end] = row.input_ids
            labels[used:end] = row.labels
            trained += int(np.count_nonzero(row.labels != IGNORED))
            used = end
        ids[used:] = pad_token_id
        labels[used:] = IGNORED
        place = 0
        for length in lengths:
            positions[place : place + length] = counting[:length]
            place += length
        branchings = [row.branching for row in rows if row.branching]
        branching = PrefixSharing.joined(branchings) if branchings else None
        if branching:
            positions[:used] = branching.positions()
        numbered = tuple((row.number, len(row.input_ids)) for row in rows)
        parts.append(_Part(tuple(lengths), used, trained, numbered, branching))
        start += total
    return CollatedStep(torch.from_numpy(values), tuple(parts))


def _documents(rows: Sequence[Row]) -> list[int]:
    """The length of every document."""
    lengths = [length for row in rows for length in row.lengths.tolist()]
    used, held = sum(lengths), sum(len(row.input_ids) for row in rows)
    if held != used:
        raise ValueError(f"the rows hold {held} tokens, but their lengths sum to {used}")
    return lengths


def _documents_of_padding(tokens: int) -> list[int]:
    """Short ones: attention is quadratic in a document's length, and what is padded is not used."""
    whole, rest = divmod(tokens, PADDING)
    return [PADDING] * whole + [rest] * (rest > 0)


def _totals(used: Sequence[int], multiple: int, pad_to: PadTo) -> list[int]:
    """Tokens of each micro-batch, padding included."""
    longest = max(used, default=0)
    if isinstance(pad_to, int):
        if longest > pad_to:
            raise ValueError(f"rows of {longest} tokens do not fit a length of {pad_to}")
        wanted = [pad_to] * len(used)
    else:
        wanted = [longest] * len(used) if pad_to == "longest" else used
    return [max(1, -(-tokens // multiple)) * multiple for tokens in wanted]
