"""Embedding, head and loss where each rank of a group holds some entries of the vocabulary.

T tokens, S those that are trained, C those of a chunk, D model width, V vocabulary, W the entries
that are here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

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
from penstock.losses.cross_entropy import CHUNK, sum_cross_entropy

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
    chunk: int = CHUNK,
) -> SumOfLosses:
    """`losses.cross_entropy.sum_cross_entropy` for a model divided over the mesh's tensor axis.

    With `divided` logits a rank holds [C, W] of them, and two numbers per token travel; with
    `gathered` ones each rank holds [C, V].
    """
    group = mesh.group("tensor")
    if group is None:
        return partial(sum_cross_entropy, chunk=chunk)
    size = mesh.size("tensor")
    shares = [share(vocab_size, size, index) for index in range(size)]
    first = shares[mesh.index("tensor")].start
    widths = [len(each) for each in shares]

    def summed(hidden: torch.Tensor, head: nn.Module, labels_T: torch.Tensor) -> torch.Tensor:
        hidden_TD = enter(hidden, group, residual)
        if logits == "gathered":
            return sum_cross_entropy(
                hidden_TD,
                lambda hidden_CD: gather_columns(head(hidden_CD), group, widths),
                labels_T,
                chunk=chunk,
            )
        return sum_cross_entropy(
            hidden_TD,
            head,
            labels_T,
            chunk=chunk,
            of_logits=lambda logits_CW, labels_C: _OfDividedLogits.apply(
                logits_CW, labels_C, first, group
            ),
        )

    return summed


def _within(ids: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which row of those from `first` on an id is, or 0; and whether it is one."""
    at = ids - first
    here = (at >= 0) & (at < count)
    return at.masked_fill(~here, 0), here


class _OfDividedLogits(torch.autograd.Function):
    """The summed cross-entropy of logits that lie side by side on the ranks of a group.

    Each rank reduces its own columns; the log of a sum of exponentials is that of the ranks' own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_CW: torch.Tensor,
        labels_C: torch.Tensor,
        first: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        at_C, here_C = _within(labels_C, first, logits_CW.shape[1])
        precise_CW = logits_CW.float()
        target_C = precise_CW.gather(1, at_C[:, None]).squeeze(1).masked_fill(~here_C, 0)
        mine = torch.stack((precise_CW.logsumexp(1), target_C))
        log_sums, targets = gathered(mine, group).unflatten(0, (-1, 2)).unbind(1)
        log_sum_C = log_sums.logsumexp(0)
        ctx.save_for_backward(logits_CW, at_C, here_C, log_sum_C)
        # One rank knows a token's own logit, and the others say 0: no rounding.
        return (log_sum_C - targets.sum(0)).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_CW, at_C, here_C, log_sum_C = ctx.saved_tensors
        grad_CW = (logits_CW.float() - log_sum_C[:, None]).exp_()
        grad_CW.scatter_add_(1, at_C[:, None], -here_C[:, None].float())
        return grad_CW.mul_(grads[0]).to(logits_CW.dtype), None, None, None
