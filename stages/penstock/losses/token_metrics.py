"""Token-level evaluation metrics (loss, accuracy) without gradients and without all logits at once.

T tokens, S requested tokens, C tokens of a chunk, D hidden size, V vocabulary size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from penstock.losses.cross_entropy import CROSS_ENTROPY, Head, Loss, compute_logits, soft_capped
from penstock.losses.labels import Labels
from penstock.losses.logits_loss import LogitsMetric, per_token
from penstock_kernels.logit_chunks import tokens_at_once

MaxReduceFn = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise max all-reduce over the vocab-parallel ranks; called by all of them in the same
order."""


class Scores(NamedTuple):
    """Metrics of the tokens that have a label."""

    positions: torch.Tensor
    """Their indices among the T tokens, [S]."""
    losses: torch.Tensor
    """Cross-entropy, fp32 [S]."""
    is_correct: torch.Tensor
    """Whether the label has the highest logit (ties count), bool [S]."""
    values: torch.Tensor
    """Those of the metrics of packages, fp32 [M, S]."""


@torch.no_grad()
def token_scores(
    hidden_TD: torch.Tensor,
    head: Head,
    labels_T: torch.Tensor | Labels,
    *,
    width: int,
    loss: Loss = CROSS_ENTROPY,
    max_reduce: MaxReduceFn | None = None,
    metrics: Sequence[LogitsMetric] = (),
) -> Scores:
    """Loss and top-1 accuracy of each trained token. labels[t] is the target of position t.

    Args:
        hidden_TD: hidden states.
        head: computes logits.
        labels_T: shifted labels; -100 is ignored.
        width: maximum vocabulary entries per rank.
        loss: the loss to compute.
        max_reduce: max all-reduce, needed if the head has only the vocabulary shard `loss.divided`.
        metrics: those of packages, which need a head with the whole vocabulary.
    """
    first = loss.divided.first if loss.divided else 0
    losses: list[torch.Tensor] = []
    is_correct: list[torch.Tensor] = []
    labels = Labels.of(labels_T)
    positions = labels.trained
    values_MS = hidden_TD.new_zeros((len(metrics), len(positions)), dtype=torch.float32)
    start = 0
    for some, logits_CV in chunked_logits(hidden_TD, head, positions, loss, width):
        labels_C = labels.values.index_select(0, some)
        losses.append(loss.of_logits(logits_CV, labels_C).float())
        at_C = labels_C - first
        elsewhere_C = (at_C < 0) | (at_C >= logits_CV.shape[1])
        own_C = logits_CV.gather(1, at_C.masked_fill(elsewhere_C, 0)[:, None]).squeeze(1)
        # -inf on ranks without the label's logit, so that the maximum over ranks is that logit.
        pair = torch.stack([own_C.masked_fill(elsewhere_C, -torch.inf), logits_CV.amax(1)]).float()
        label_C, best_C = max_reduce(pair) if max_reduce else pair
        is_correct.append(label_C >= best_C)
        if metrics:
            logits_CV = soft_capped(logits_CV.float(), loss.terms.soft_cap)
        for metric, values_S in zip(metrics, values_MS, strict=True):
            values_C = metric.token_values(logits_CV, labels_C)
            values_S[start : start + len(some)] = per_token(metric, values_C, labels_C)
        start += len(some)
    nothing = hidden_TD.new_zeros(0, dtype=torch.float32)
    return Scores(
        positions,
        torch.cat([nothing, *losses]),
        torch.cat([nothing.bool(), *is_correct]),
        values_MS,
    )


def chunked_logits(
    hidden_TD: torch.Tensor, head: Head, positions_S: torch.Tensor, loss: Loss, width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield indices and their logits [C, V], not soft-capped, one chunk at a time. Without indices
    the head is called anyway, so that its collectives do not hang other ranks."""
    chunk = loss.chunk or tokens_at_once(width * hidden_TD.itemsize, hidden_TD.device.type)
    if not len(positions_S):
        compute_logits(hidden_TD[:0], head, loss.precision)
    for start in range(0, len(positions_S), chunk):
        some = positions_S[start : start + chunk]
        yield some, compute_logits(hidden_TD.index_select(0, some), head, loss.precision)
