"""Cross-entropy summed over trained tokens, without ever holding a micro-batch's logits.

T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.losses.linear_cross_entropy import linear_cross_entropy
from penstock.models.layers.dropout import Noise, current_noise, drawing_from

IGNORED = -100
"""The label of a position that is not trained."""

CHUNK = 1024
"""Tokens whose logits are held at a time: 0.6 GB in fp32 for a vocabulary of 150 thousand."""


Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [C, D] to logits."""

OfLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits and labels [C] to the summed cross-entropy, a scalar in fp32."""


def of_whole_logits(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    """The summed cross-entropy where the logits of every token of the vocabulary are here."""
    return F.cross_entropy(logits_CV.float(), labels_C, reduction="sum")


def sum_cross_entropy(
    hidden_TD: torch.Tensor,
    head: Head,
    labels_T: torch.Tensor,
    *,
    chunk: int = CHUNK,
    of_logits: OfLogits = of_whole_logits,
) -> torch.Tensor:
    """The summed cross-entropy of the tokens with a label, a scalar in fp32.

    labels[t] is the target of position t itself (already shifted); -100 is not trained. Positions
    that are not trained are left out before the head, so they cost nothing. At most `chunk` tokens'
    logits are held at a time; the softmax is in fp32. Where the head is one matrix and nothing
    else, gradients are computed with the loss, else logits once more in the backward pass.
    Without any trained token the sum is exactly 0 and still reaches the head and the hidden states,
    whose gradients are zeros: every process of a group must take part in its collectives.
    `of_logits` is what is made of a chunk's logits, whatever `head` gives as such. A head that
    draws from a noise gets that of its tokens.

    Raises:
        ValueError: for a chunk below 1, or labels that are not one per position.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; logits are computed at least one token at a time")
    if labels_T.shape != hidden_TD.shape[:1]:
        raise ValueError(f"{tuple(labels_T.shape)} labels for {tuple(hidden_TD.shape)} positions")
    trained = (labels_T != IGNORED).nonzero().squeeze(1)
    hidden_SD, labels_S = hidden_TD.index_select(0, trained), labels_T.index_select(0, trained)
    noise = current_noise()
    noise = noise.of(trained) if noise else None
    if not len(trained):
        with drawing_from(noise):
            return head(hidden_SD).float().sum()
    if of_logits is of_whole_logits and _is_one_matrix(head):
        return linear_cross_entropy(hidden_SD, head.weight, labels_S, chunk=chunk)
    total = hidden_SD.new_zeros((), dtype=torch.float32)
    for start in range(0, len(trained), chunk):
        some = slice(start, start + chunk)
        here = noise.of(some) if noise else None
        given = hidden_SD[some], head, labels_S[some], of_logits, here
        total = total + checkpoint(_summed, *given, use_reentrant=False)
    return total


def _is_one_matrix(head: Head) -> TypeGuard[nn.Linear]:
    # Another class does more than multiply, be it an adapter's part or to gather its weight.
    return type(head) is nn.Linear and head.bias is None  # pyright: ignore[reportFunctionMemberAccess]


def _summed(
    hidden_CD: torch.Tensor,
    head: Head,
    labels_C: torch.Tensor,
    of_logits: OfLogits,
    noise: Noise | None,
) -> torch.Tensor:
    with drawing_from(noise):
        return of_logits(head(hidden_CD), labels_C)
