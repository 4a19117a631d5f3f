"""Sub-batches of documents of similar length, for models that compute a padded batch: transformers'
code that cannot pack (`models.automodel`).

A padded batch has the width of its longest document. Each sub-batch is a micro-batch of its own:
loss and gradients are sums over documents, so they stay the same. FSDP runs collectives in every
pass, so all ranks must run the same number of them (`TokenCounts.sub_batches`).

N documents of a micro-batch, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.decoder_config import DecoderConfig
from penstock.rows.collate import MicroBatch
from penstock.rows.schema import IGNORED

TOLERATED_PADDING = 0.25
"""A micro-batch is split until padding is at most this share of its tokens ..."""
MAX_SUB_BATCHES = 8
"""... or it has this many sub-batches."""


def is_padded(config: DecoderConfig) -> bool:
    """Whether the model computes padded batches of documents, of which some can be taken out:
    images cannot."""
    if not isinstance(config, AutoModelConfig) or config.outline.media is not None:
        return False
    return not config.outline.traits.packing


def num_sub_batches(batch: MicroBatch) -> int:
    """The sub-batches that a micro-batch needs."""
    lengths = _document_lengths(batch)
    tokens = sum(lengths)
    for number in range(1, MAX_SUB_BATCHES):
        if padded_tokens(cut(lengths, number), lengths) <= (1 + TOLERATED_PADDING) * tokens:
            return number
    return MAX_SUB_BATCHES


def split_by_length(batch: MicroBatch, number: int) -> list[tuple[MicroBatch, torch.Tensor]]:
    """So many sub-batches, each with the place in `batch` of its tokens, int64. Padding documents
    are left out. A sub-batch without documents repeats the first token, untrained.
    """
    lengths = _document_lengths(batch)
    starts = (0, *accumulate(lengths))
    sub_batches = [_sub_batch(batch, group, starts) for group in cut(lengths, number)]
    empty = replace(
        batch,
        input_ids_T=batch.input_ids_T[:1],
        labels_T=torch.full((1,), IGNORED),
        position_ids_T=torch.zeros(1, dtype=torch.int64),
        loss_weights_T=None,
        lengths=(1,),
        num_tokens=0,
        num_trained=0,
        rows=(),
        chosen_places_T=torch.full((1,), -1),
    )
    num_empty = number - len(sub_batches)
    return sub_batches + [(empty, torch.zeros(1, dtype=torch.int64))] * num_empty


def cut(lengths: Sequence[int], number: int) -> list[list[int]]:
    """The documents in at most `number` groups with the fewest padded tokens.

    Each group is a range of the documents in order of length; where to cut is found by dynamic
    programming over the distinct lengths.
    """
    if not lengths:
        return []
    by_length: dict[int, list[int]] = {}
    for document in sorted(range(len(lengths)), key=lambda doc: -lengths[doc]):
        by_length.setdefault(lengths[document], []).append(document)
    # U distinct lengths, longest first; ends[i]: how many documents the first i of them have.
    widths_U = np.array(list(by_length), dtype=np.float64)
    ends = np.cumsum([0, *map(len, by_length.values())])
    # cost[i, j]: slots of one group of the distinct lengths i to j - 1.
    cost = widths_U[:, None] * (ends[None, :] - ends[:-1, None])
    # No group is empty.
    cost[ends[None, :] <= ends[:-1, None]] = np.inf
    best, choices = cost[0], list[np.ndarray]()
    for _ in range(min(number, len(widths_U)) - 1):
        # total[i, j]: the groups before cover lengths up to i, and the last one those from i to j.
        total = best[:-1, None] + cost
        choices.append(total.argmin(0))
        best = total.min(0)
    cuts = [len(widths_U)]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    documents = [doc for group in by_length.values() for doc in group]
    bounds = pairwise([0, *reversed(cuts)])
    return [sorted(documents[ends[first] : ends[end]]) for first, end in bounds]


def padded_tokens(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Tokens of the groups' padded batches, padding included."""
    return sum(len(group) * max(lengths[doc] for doc in group) for group in groups)


def _document_lengths(batch: MicroBatch) -> list[int]:
    """Of the documents before the padding."""
    ends = accumulate(batch.lengths)
    return [n for n, end in zip(batch.lengths, ends, strict=True) if end <= batch.num_tokens]


def _sub_batch(
    batch: MicroBatch, group: Sequence[int], starts: Sequence[int]
) -> tuple[MicroBatch, torch.Tensor]:
    tokens_T = torch.cat([torch.arange(starts[doc], starts[doc + 1]) for doc in group])
    labels_T, places_T = batch.labels_T[tokens_T], batch.places()[tokens_T]
    lengths = tuple(starts[doc + 1] - starts[doc] for doc in group)
    firsts = [starts[doc] for doc in group]
    sub_batch = replace(
        batch,
        input_ids_T=batch.input_ids_T[tokens_T],
        labels_T=labels_T,
        position_ids_T=batch.position_ids_T[tokens_T],
        loss_weights_T=None if batch.loss_weights_T is None else batch.loss_weights_T[tokens_T],
        lengths=lengths,
        num_tokens=len(tokens_T),
        num_trained=int((labels_T != IGNORED).sum()),
        # The high 32 bits of a place are the number of the row.
        rows=tuple(zip((batch.places()[firsts] >> 32).tolist(), lengths, strict=True)),
        # Dropout draws by place, so masks are those of the unsplit micro-batch.
        chosen_places_T=places_T,
    )
    return sub_batch, tokens_T
