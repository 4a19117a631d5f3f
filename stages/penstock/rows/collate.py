"""Collate packed rows into micro-batches of tensors. T tokens per micro-batch, with padding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch

from penstock.rows.image_batch import ImageBatch
from penstock.rows.reader import Row
from penstock.rows.schema import IGNORED
from penstock.rows.shared_prefix import PrefixSharing, Span

PADDING = 1024
"""Maximum tokens of a padding document."""

PadTo = int | Literal["own", "longest"]
"""Length of a micro-batch: its own, that of the longest one in its step, or a number of tokens;
always rounded up to a multiple."""


@dataclass(frozen=True)
class MicroBatch:
    """Packed documents without a batch dimension.

    `lengths` are the document lengths and sum to T; padding comes last, in separate documents.
    `labels_T` are already shifted, and -100 at untrained positions and in the padding.
    """

    input_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    labels_T: torch.Tensor  # noqa: N815 - T names the dimension
    position_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    lengths: tuple[int, ...]
    num_tokens: int
    """Number of tokens without padding."""
    num_trained: int
    rows: tuple[tuple[int, int], ...]
    """(row number, number of tokens) of each row, in order."""
    branching: PrefixSharing | None = None
    """Prefix sharing of all documents except padding; None for SFT data or without rows."""
    chosen_places_T: torch.Tensor | None = None  # noqa: N815 - T names the dimension
    """`places` of a micro-batch that is part of another; None: those of its rows in order."""
    images: ImageBatch | None = None
    """The images of its documents; None without images."""
    bidirectional: tuple[tuple[int, int], ...] = ()
    """First token and end of each run of tokens that attend to one another in both directions."""
    loss_weights_T: torch.Tensor | None = None  # noqa: N815 - T names the dimension
    """fp32: loss weight of each label, above 0; 0 without a label. None: all labels weigh 1."""

    @property
    def loss_weight(self) -> float:
        """Sum of the loss weights, in fp64: the number of trained tokens if all weigh 1."""
        weights_T = self.loss_weights_T
        return self.num_trained if weights_T is None else weights_T.double().sum().item()

    def branch_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        """Branch index of each token, int64 [T], numbered across the micro-batch; -1 for shared
        prefix tokens and padding. Covers the whole micro-batch."""
        branch = np.full(sum(self.lengths), -1, dtype=np.int64)
        if self.branching:
            branches = self.branching.branch_of_tokens()
            branch[: len(branches)] = branches
        return torch.from_numpy(branch)

    def prompt_targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels of prompt tokens, which are masked in `labels_T`: each prompt token is the target
        of the preceding position, once per sample. int64 [T] each, of the whole micro-batch.

        Returns:
            labels_T: shifted prompt labels; -100 outside of prompts.
            sample_T: sample index of each label; -1 elsewhere.
        """
        labels, sample = (np.full(sum(self.lengths), fill, np.int64) for fill in (IGNORED, -1))
        if self.branching:
            samples = self.branching.sample_of_prompt_tokens(self.labels_T.numpy())
            positions = np.flatnonzero(samples >= 0)
            # The last shared token is followed by the first branch, which begins with the prompt's
            # last token.
            labels[positions] = self.input_ids_T.numpy()[positions + 1]
            sample[positions] = samples[positions]
        return torch.from_numpy(labels), torch.from_numpy(sample)

    def spans(self) -> list[Span] | None:
        """Visibility spans of the attention mask; None if attention is causal within documents."""
        if not (self.branching and self.branching.is_shared):
            return None
        ends = list(accumulate(self.lengths))[len(self.branching.prompts) - 1 :]
        return self.branching.spans() + [Span(*pair, pair[1]) for pair in pairwise(ends)]

    def places(self) -> torch.Tensor:
        """Position of each token in the packed rows, int64 [T]: row number in the high 32 bits,
        index in the row in the low 32 bits; -1 for padding. Covers the whole micro-batch."""
        if self.chosen_places_T is not None:
            return self.chosen_places_T
        indices = np.full(sum(self.lengths), -1, dtype=np.int64)
        start = 0
        for number, size in self.rows:
            indices[start : start + size] = (number << 32) + np.arange(size)
            start += size
        return torch.from_numpy(indices)


@dataclass(frozen=True)
class _Part:
    lengths: tuple[int, ...]
    num_tokens: int
    num_trained: int
    rows: tuple[tuple[int, int], ...]
    branching: PrefixSharing | None
    images: ImageBatch | None

    def pin_memory(self) -> "_Part":
        return replace(self, images=self.images.pin_memory()) if self.images else self


@dataclass(frozen=True)
class CollatedStep:
    """The micro-batches of a step in one tensor: [3, sum of T], int64; loss weights and images
    apart.

    A single tensor is cheaper to send between processes and to pin.
    """

    values: torch.Tensor
    parts: tuple[_Part, ...]
    loss_weights: torch.Tensor | None = None
    """fp32 [sum of T]; None if all labels weigh 1."""

    def pin_memory(self) -> "CollatedStep":
        """A copy in pinned memory, for asynchronous copies to the GPU."""
        parts = tuple(part.pin_memory() for part in self.parts)
        weights = self.loss_weights
        pinned = None if weights is None else weights.pin_memory()
        return CollatedStep(self.values.pin_memory(), parts, pinned)

    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches, as views."""
        micro_batches: list[MicroBatch] = []
        start = 0
        for part in self.parts:
            size = sum(part.lengths)
            ids, labels, positions = self.values.narrow(1, start, size).unbind()
            weights = self.loss_weights
            weights_T = None if weights is None else weights.narrow(0, start, size)
            micro_batches.append(
                # Not dataclasses.asdict, which copies all that is in a part.
                MicroBatch(ids, labels, positions, **vars(part), loss_weights_T=weights_T)
            )
            start += size
        return micro_batches


def collate(
    groups: Sequence[Sequence[Row]],
    *,
    pad_to_multiple_of: int,
    pad_to: PadTo = "own",
    pad_token_id: int = 0,
) -> CollatedStep:
    """Concatenate and pad each group of rows to one micro-batch.

    A group without rows becomes padding only, at least one multiple. Labels are already shifted and
    are copied unchanged. Documents are not aligned here or on disk: attention that needs alignment
    (context parallelism) pads them later, so one packed artifact serves every parallel layout.

    Raises:
        ValueError: if the document lengths of a row do not sum to its tokens, or the rows are
            longer than the number `pad_to`.
    """
    documents = [_documents(rows) for rows in groups]
    totals = _totals([sum(lengths) for lengths in documents], pad_to_multiple_of, pad_to)
    for lengths, total in zip(documents, totals, strict=True):
        lengths += _documents_of_padding(total - sum(lengths))
    values = np.empty((3, sum(totals)), dtype=np.int64)
    is_weighted = any(row.loss_weights is not None for rows in groups for row in rows)
    weights = np.zeros(sum(totals) if is_weighted else 0, dtype=np.float32)
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
            is_trained = row.labels != IGNORED
            trained += int(np.count_nonzero(is_trained))
            if is_weighted:
                own = is_trained if row.loss_weights is None else row.loss_weights
                weights[start + used : start + end] = own
            used = end
        ids[used:] = pad_token_id
        labels[used:] = IGNORED
        offset = 0
        for length in lengths:
            positions[offset : offset + length] = counting[:length]
            offset += length
        branchings = [row.branching for row in rows if row.branching]
        branching = PrefixSharing.joined(branchings) if branchings else None
        if branching:
            positions[:used] = branching.positions()
        numbered = tuple((row.number, len(row.input_ids)) for row in rows)
        images = ImageBatch.concatenate([image for row in rows for image in row.images])
        parts.append(_Part(tuple(lengths), used, trained, numbered, branching, images))
        start += total
    return CollatedStep(
        torch.from_numpy(values),
        tuple(parts),
        torch.from_numpy(weights) if is_weighted else None,
    )


def _documents(rows: Sequence[Row]) -> list[int]:
    lengths = [length for row in rows for length in row.lengths.tolist()]
    used, held = sum(lengths), sum(len(row.input_ids) for row in rows)
    if held != used:
        raise ValueError(f"the rows hold {held} tokens, but their lengths sum to {used}")
    return lengths


def _documents_of_padding(tokens: int) -> list[int]:
    # Short documents, because attention is quadratic in their length.
    num_full, remainder = divmod(tokens, PADDING)
    return [PADDING] * num_full + [remainder] * (remainder > 0)


def _totals(used: Sequence[int], multiple: int, pad_to: PadTo) -> list[int]:
    longest = max(used, default=0)
    if isinstance(pad_to, int):
        if longest > pad_to:
            raise ValueError(f"rows of {longest} tokens do not fit a length of {pad_to}")
        padded = [pad_to] * len(used)
    else:
        padded = [longest] * len(used) if pad_to == "longest" else used
    # At least one multiple: a replica without rows still takes part in the collectives.
    return [max(1, -(-tokens // multiple)) * multiple for tokens in padded]
