"""Cross-entropy summed over trained tokens, without ever holding a micro-batch's logits.

T tokens, D model width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The label of a position that is not trained."""

CHUNK = 1024
"""Tokens whose logits are held at a time: 0.6 GB in fp32 for a vocabulary of 150 thousand."""


def sum_cross_entropy(
    hidden_TD: torch.Tensor, head: nn.Module, labels_T: torch.Tensor, *, chunk: int = CHUNK
) -> torch.Tensor:
    """The summed cross-entropy of the tokens with a label, a scalar in fp32.

    labels[t] is the target of position t itself (already shifted); -100 is not trained. Positions
    that are not trained are left out before the head, so they cost nothing. Logits are computed
    `chunk` tokens at a time and once more in the backward pass; the softmax is in fp32.
    Without any trained token the sum is exactly 0 and still reaches the head and the hidden states,
    whose gradients are zeros: every process of a group must take part in its collectives.

    Raises:
        ValueError: for a chunk below 1, or labels that are not one per position.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; logits are computed at least one token at a time")
    if labels_T.shape != hidden_TD.shape[:1]:
        raise ValueError(f"{tuple(labels_T.shape)} labels for {tuple(hidden_TD.shape)} positions")
    trained = (labels_T != IGNORED).nonzero().squeeze(1)
    hidden_SD, labels_S = hidden_TD.index_select(0, trained), labels_T.index_select(0, trained)
    if not len(trained):
        return head(hidden_SD).float().sum()
    total = hidden_SD.new_zeros((), dtype=torch.float32)
    for hidden_CD, labels_C in zip(hidden_SD.split(chunk), labels_S.split(chunk), strict=True):
        part = checkpoint(_summed, hidden_CD, head, labels_C, use_reentrant=False)
        total = total + part
    return total


def _summed(hidden_CD: torch.Tensor, head: nn.Module, labels_C: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden_CD).float(), labels_C, reduction="sum")
