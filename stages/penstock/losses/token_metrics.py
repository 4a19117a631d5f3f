"""What a model makes of each token, for those who only look: no gradients, and never all logits.

T tokens, S those that are asked for, C those of a chunk, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from penstock.losses.cross_entropy import CROSS_ENTROPY, IGNORED, Head, Loss, compute_logits
from penstock_kernels.logit_chunks import tokens_at_once

Highest = Callable[[torch.Tensor], torch.Tensor]
"""From numbers that are here to the highest of all ranks that hold other entries of the vocabulary,
one by one; called by all holders, in one order."""


class Scores(NamedTuple):
    """Of the tokens that have a label."""

    places: torch.Tensor
    """Which of the T tokens they are, [S]."""
    losses: torch.Tensor
    """Cross-entropy, fp32 [S]."""
    right: torch.Tensor
    """Whether no entry of the vocabulary is likelier than the label, bool [S]."""


@torch.no_grad()
def token_scores(
    hidden_TD: torch.Tensor,
    head: Head,
    labels_T: torch.Tensor,
    *,
    width: int,
    loss: Loss = CROSS_ENTROPY,
    highest: Highest | None = None,
) -> Scores:
    """How well each trained token is foretold. labels[t] is the target of position t itself.

    Args:
        width: entries of the vocabulary that a rank holds, at most.
        highest: where the head gives only some entries, those of `loss.divided`.
    """
    first = loss.divided.first if loss.divided else 0
    losses: list[torch.Tensor] = []
    right: list[torch.Tensor] = []
    places = (labels_T != IGNORED).nonzero().squeeze(1)
    for some, logits_CV in chunked_logits(hidden_TD, head, places, loss, width):
        labels_C = labels_T.index_select(0, some)
        losses.append(loss.of_logits(logits_CV, labels_C).float())
        at_C = labels_C - first
        elsewhere_C = (at_C < 0) | (at_C >= logits_CV.shape[1])
        own_C = logits_CV.gather(1, at_C.masked_fill(elsewhere_C, 0)[:, None]).squeeze(1)
        pair = torch.stack([own_C.masked_fill(elsewhere_C, -torch.inf), logits_CV.amax(1)]).float()
        label_C, best_C = highest(pair) if highest else pair
        right.append(label_C >= best_C)
    nothing = hidden_TD.new_zeros(0, dtype=torch.float32)
    return Scores(places, torch.cat([nothing, *losses]), torch.cat([nothing.bool(), *right]))


def chunked_logits(
    hidden_TD: torch.Tensor, head: Head, places_S: torch.Tensor, loss: Loss, width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some of the places and their logits [C, V], one chunk after another.

    Where no place is asked for the head is called all the same: ranks of a group may wait there.
    """
    chunk = loss.chunk or tokens_at_once(width * hidden_TD.itemsize, hidden_TD.device.type)
    if not len(places_S):
        compute_logits(hidden_TD[:0], head, loss.precision)
    for start in range(0, len(places_S), chunk):
        some = places_S[start : start + chunk]
        yield some, compute_logits(hidden_TD.index_select(0, some), head, loss.precision)
