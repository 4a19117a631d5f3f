"""Embedding, head and loss where each rank of a group holds some entries of the vocabulary.

T tokens, S those that are trained, C those of a chunk, D model width, V vocabulary, W the entries
that are here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from penstock.engine.parallel.collectives import (
    Residual,
    enter,
    gather_columns,
    gathered,
    leave,
)
from penstock.engine.parallel.cuts import share
from penstock.engine.parallel.mesh import Mesh
from penstock.losses.cross_entropy import CROSS_ENTROPY, Loss, logits_of, sum_cross_entropy
from penstock_kernels.cross_entropy import Divided, Tally

Logits = Literal["divided", "gathered"]
"""Whether the loss is computed from each rank's own logits, or from those of all ranks on each."""

SumOfLosses = Callable[[torch.Tensor, nn.Module, torch.Tensor], torch.Tensor]
"""Final hidden states, the head and labels [T] to the summed cross-entropy, the same on all ranks
of the group. Hidden states are [T, D], or where the residual stream is split a share of them."""


class DividedEmbedding(nn.Embedding):
    """An embedding table of which other rows are on other ranks."""

    def __init__(
        self, rows_WD: nn.Parameter, first: int, group: dist.ProcessGroup, residual: Residual
    ) -> None:
        """`rows_WD` are the table's rows from `first` on."""
        super().__init__(rows_WD.shape[0], rows_WD.shape[1], device="meta")
        self.weight = rows_WD
        self.first, self.group = first, group
        self.residual: Residual = residual

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embeddings of token ids [T]: of all of them, or with a split residual of a share."""
        return leave(rows_here(input, self.weight, self.first), self.group, self.residual)


def rows_here(ids_T: torch.Tensor, rows_WF: torch.Tensor, first: int) -> torch.Tensor:
    """Of a table of which the rows from `first` on are here, those of token ids, else zeros."""
    at_T, here_T = _within(ids_T, first, rows_WF.shape[0])
    return F.embedding(at_T, rows_WF).masked_fill(~here_T[:, None], 0)


def sum_of_losses(
    mesh: Mesh,
    vocab_size: int,
    *,
    residual: Residual = "whole",
    logits: Logits = "divided",
    loss: Loss = CROSS_ENTROPY,
) -> SumOfLosses:
    """`losses.cross_entropy.sum_cross_entropy` for a model divided over the mesh's tensor axis.

    With `divided` logits a rank holds [C, W] of them, and two numbers per token travel, or three
    where labels are smoothed; with `gathered` ones each rank holds [C, V].
    """
    group = mesh.group("tensor")
    if group is None:
        return partial(sum_cross_entropy, loss=loss)
    size = mesh.size("tensor")
    shares = [share(vocab_size, size, index) for index in range(size)]
    widths = [len(each) for each in shares]
    divided = Divided(
        first=shares[mesh.index("tensor")].start,
        size=vocab_size,
        widest=max(widths),
        merge=partial(_merged, group=group),
    )

    def summed(hidden: torch.Tensor, head: nn.Module, labels_T: torch.Tensor) -> torch.Tensor:
        hidden_TD = enter(hidden, group, residual)
        if logits == "gathered":
            return sum_cross_entropy(
                hidden_TD,
                lambda hidden_CD: gather_columns(
                    logits_of(hidden_CD, head, loss.precision), group, widths
                ),
                labels_T,
                loss,
            )
        return sum_cross_entropy(hidden_TD, head, labels_T, replace(loss, divided=divided))

    return summed


def _merged(own: Tally, group: dist.ProcessGroup) -> Tally:
    """The tally of logits that lie side by side on the ranks of a group, from each rank's own.

    The log of a sum of exponentials is that of the ranks' own.
    """
    mine = torch.stack([numbers for numbers in own if numbers is not None])
    log_sums, *others = gathered(mine, group).unflatten(0, (-1, len(mine))).unbind(1)
    # One rank knows a token's own logit, and the others say 0: no rounding.
    target_C, *totals = (each.sum(0) for each in others)
    return Tally(log_sums.logsumexp(0), target_C, totals[0] if totals else None)


def _within(ids: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which row of those from `first` on an id is, or 0; and whether it is one."""
    at = ids - first
    here = (at >= 0) & (at < count)
    return at.masked_fill(~here, 0), here
