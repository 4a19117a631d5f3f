"""Vocab-parallel embedding, LM head and loss: each rank of a group holds part of the vocabulary.

T tokens, S trained tokens, C tokens of a chunk, D model width, V vocabulary, W vocabulary entries
of this rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from penstock.engine.distributed.collectives import (
    ReduceDtype,
    Residual,
    all_gather_dim0,
    copy_to_tp_region,
    gather_columns,
    reduce_from_tp_region,
)
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.tensor_sharding import shard_range
from penstock.losses.cross_entropy import (
    CROSS_ENTROPY,
    Head,
    Loss,
    compute_logits,
    soft_capped,
    sum_cross_entropy,
    token_log_probs,
)
from penstock.losses.labels import Labels
from penstock.losses.logits_loss import LogitsMetric
from penstock.losses.token_metrics import Scores, chunked_logits, token_scores
from penstock_kernels.cross_entropy import SoftmaxStats, VocabShard

Logits = Literal["divided", "gathered"]
"""Whether the loss is computed from each rank's own logits, or from gathered ones on every rank."""


class SumLossFn(Protocol):
    """Function from final hidden states, head and labels [T] to `scale` times the summed
    cross-entropy, the same on all ranks of the group. Hidden states are [T, D], or a share of them
    with a split residual stream.
    """

    def __call__(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        labels_T: torch.Tensor | Labels,
        /,
        *,
        scale: float = 1,
    ) -> torch.Tensor: ...


LogProbsFn = Callable[[torch.Tensor, nn.Module, torch.Tensor | Labels], torch.Tensor]
"""Function from final hidden states, head and labels [T] to the labels' log-probs [T], with
gradients; labels [T, K] give [T, K]. Like the next two, the same on all ranks of the group."""

TokenScoresFn = Callable[[torch.Tensor, nn.Module, torch.Tensor | Labels], Scores]
"""Function from final hidden states, head and labels [T] to the scores of each trained token."""

LogitsFn = Callable[
    [torch.Tensor, nn.Module, torch.Tensor], Iterator[tuple[torch.Tensor, torch.Tensor]]
]
"""Function from final hidden states, head and token positions [S] to chunks of positions and their
full-vocabulary logits [C, V]."""


class VocabParallelEmbedding(nn.Embedding):
    """An embedding table whose other rows are on other ranks."""

    def __init__(
        self, rows_WD: nn.Parameter, first: int, group: dist.ProcessGroup, residual: Residual
    ) -> None:
        # On the meta device: the weight that nn.Embedding makes is replaced.
        super().__init__(rows_WD.shape[0], rows_WD.shape[1], device="meta")
        self.weight = rows_WD
        self.first, self.group = first, group
        self.residual: Residual = residual

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embeddings of token ids [T]: of all, or of this rank's share with a split residual."""
        return reduce_from_tp_region(
            lookup_local_rows(input, self.weight, self.first), self.group, self.residual
        )


def lookup_local_rows(ids_T: torch.Tensor, rows_WF: torch.Tensor, first: int) -> torch.Tensor:
    """Look up token ids in the rows from `first` on; zeros for ids on other ranks."""
    local_T = ids_T - first
    elsewhere_T = (local_T < 0) | (local_T >= rows_WF.shape[0])
    # Ids of other ranks look up row 0; the mask also keeps gradients from it.
    looked_up_TF = F.embedding(local_T.masked_fill(elsewhere_T, 0), rows_WF)
    return looked_up_TF.masked_fill(elsewhere_T[:, None], 0)


@dataclass(frozen=True)
class VocabParallelHead:
    """The LM head and losses of a model that is split over the mesh's tensor axis.

    With `divided` logits a rank holds [C, W], and two numbers per token are communicated, or three
    with label smoothing; with `gathered` logits each rank holds [C, V].
    """

    mesh: Mesh
    size: int
    residual: Residual = "whole"
    logits: Logits = "divided"
    reduce_dtype: ReduceDtype = None

    def sum_cross_entropy(self, loss: Loss = CROSS_ENTROPY) -> SumLossFn:
        """`losses.cross_entropy.sum_cross_entropy` for such a model."""
        parallel = replace(self, logits="gathered") if loss.package else self

        def summed(
            hidden: torch.Tensor,
            head: nn.Module,
            labels_T: torch.Tensor | Labels,
            /,
            *,
            scale: float = 1,
        ) -> torch.Tensor:
            inputs = parallel._head_inputs(hidden, head, loss)
            return sum_cross_entropy(*inputs, labels_T, parallel._loss(loss), scale=scale)

        return summed if self._group else partial(sum_cross_entropy, loss=loss)

    def log_probs(self, loss: Loss = CROSS_ENTROPY) -> LogProbsFn:
        """`losses.cross_entropy.token_log_probs` for such a model."""

        def of_labels(
            hidden: torch.Tensor, head: nn.Module, labels_T: torch.Tensor | Labels
        ) -> torch.Tensor:
            inputs = self._head_inputs(hidden, head, loss)
            return token_log_probs(*inputs, labels_T, self._loss(loss))

        return of_labels if self._group else partial(token_log_probs, loss=loss)

    def token_scores(
        self, loss: Loss = CROSS_ENTROPY, metrics: Sequence[LogitsMetric] = ()
    ) -> TokenScoresFn:
        """`losses.token_metrics.token_scores` for such a model."""
        parallel = replace(self, logits="gathered") if metrics else self

        def max_reduce(numbers: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group)
            return numbers

        def scored(
            hidden: torch.Tensor, head: nn.Module, labels_T: torch.Tensor | Labels
        ) -> Scores:
            return token_scores(
                *parallel._head_inputs(hidden, head, loss),
                labels_T,
                # Of the widest shard: all ranks must cut the tokens into the same chunks.
                width=parallel._max_shard_size,
                loss=parallel._loss(loss),
                max_reduce=max_reduce if parallel._is_sharded else None,
                metrics=metrics,
            )

        return scored

    def full_logits(self, loss: Loss = CROSS_ENTROPY) -> LogitsFn:
        """`losses.token_metrics.chunked_logits` for such a model, gathered and soft-capped."""
        gathering = replace(self, logits="gathered")

        def capped(
            hidden: torch.Tensor, head: nn.Module, places_S: torch.Tensor
        ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            inputs = gathering._head_inputs(hidden, head, loss)
            for chunk, logits_CV in chunked_logits(*inputs, places_S, loss, self.size):
                yield chunk, soft_capped(logits_CV, loss.terms.soft_cap)

        return capped

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.mesh.group("tensor")

    @property
    def _is_sharded(self) -> bool:
        return self._group is not None and self.logits == "divided"

    @property
    def _vocab_ranges(self) -> list[range]:
        size = self.mesh.size("tensor")
        return [shard_range(self.size, size, index) for index in range(size)]

    @property
    def _max_shard_size(self) -> int:
        return max(map(len, self._vocab_ranges)) if self._is_sharded else self.size

    def _head_inputs(
        self, hidden: torch.Tensor, head: nn.Module, loss: Loss
    ) -> tuple[torch.Tensor, Head]:
        """The hidden states of all tokens, and the head that computes this rank's logits."""
        group = self._group
        if group is None:
            return hidden, head
        hidden_TD = copy_to_tp_region(hidden, group, self.residual, self.reduce_dtype)
        if self.logits == "divided":
            return hidden_TD, head
        widths = [len(vocab_range) for vocab_range in self._vocab_ranges]
        return hidden_TD, lambda hidden_CD: gather_columns(
            compute_logits(hidden_CD, head, loss.precision), group, widths
        )

    def _loss(self, loss: Loss) -> Loss:
        if not self._is_sharded:
            return loss
        assert self._group is not None
        divided = VocabShard(
            first=self._vocab_ranges[self.mesh.index("tensor")].start,
            size=self.size,
            widest=self._max_shard_size,
            merge=partial(_merge_stats, group=self._group),
        )
        return replace(loss, divided=divided)


def _merge_stats(own: SoftmaxStats, group: dist.ProcessGroup) -> SoftmaxStats:
    """Merge the softmax statistics of logit shards over the ranks of a group."""
    has_several = own.target.dim() > 1
    target_KC = own.target.t() if has_several else own.target[None]
    totals = [] if own.total is None else [own.total[None]]
    local_stats = torch.cat([own.log_sum[None], target_KC, *totals])
    log_sums, *gathered = (
        all_gather_dim0(local_stats, group).unflatten(0, (-1, len(local_stats))).unbind(1)
    )
    # One rank has a label's logit and the others contribute 0, so the sum is exact.
    sums = [partials.sum(0) for partials in gathered]
    target = torch.stack(sums[: len(target_KC)], 1) if has_several else sums[0]
    # The log-sum-exp of all logits is the log-sum-exp of the ranks' own.
    return SoftmaxStats(log_sums.logsumexp(0), target, sums[-1] if totals else None)
