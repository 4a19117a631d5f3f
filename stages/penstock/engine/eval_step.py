"""Evaluation step: losses and token counts without gradients.

Every rank takes part, whatever it holds of the model and the batches. There is no dropout, no
random draw and no router observer, so evaluation does not affect training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from penstock.engine.distributed.parallel_model import ModelInputs, ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import TokenScoresFn
from penstock.engine.split_by_length import num_sub_batches, split_by_length
from penstock.rows.collate import MicroBatch
from penstock_kernels.to_device import to_device


@dataclass(frozen=True)
class EvalModel:
    """Runs forward passes for evaluation."""

    model: ParallelModel
    ranks: ProcessInfo
    scores: TokenScoresFn
    splits_by_length: bool = False
    """As in `TrainStep`."""
    num_metrics: int = 0
    """Number of metrics of packages in the scores."""

    @torch.no_grad()
    def counts(
        self, batches: Sequence[MicroBatch], kinds: Sequence[torch.Tensor], num_kinds: int
    ) -> torch.Tensor:
        """This rank's share, fp64 [num_kinds, 4 + M]; the sum over all ranks is the result.

        For every kind of token: the summed cross-entropy, each times its loss weight; the sum of
        the loss weights; the number of trained tokens, and of those whose label is the most likely
        token; and the weighted sum of each of the M metrics of packages. `kinds` has the kind of
        each batch's tokens [T], padding included.
        """
        # fp64: counts are exact, and sums hardly depend on the order of ranks.
        columns = 4 + self.num_metrics
        totals = torch.zeros(num_kinds, columns, dtype=torch.float64, device=self.ranks.device)
        pairs = list(zip(batches, kinds, strict=True))
        if self.splits_by_length:
            numbers = self.ranks.max_over_ranks(*map(num_sub_batches, batches))
            pairs = [
                (sub_batch, kinds_T[tokens_T])
                for (batch, kinds_T), number in zip(pairs, numbers, strict=True)
                for sub_batch, tokens_T in split_by_length(batch, number)
            ]
        calls: list[ModelInputs] = []
        for batch, kinds_T in pairs:
            local_kinds_T = to_device(self.model.context.shard_tensor(kinds_T), self.ranks.device)
            count = partial(self._count, totals, local_kinds_T, batch)
            calls.append(self.model.build_inputs(batch, count, self.ranks.device))
        self.model.forward(calls)
        return totals

    def _count(
        self,
        totals: torch.Tensor,
        kinds_T: torch.Tensor,
        batch: MicroBatch,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        labels = self.model.context.shard_labels(batch, self.ranks.device)
        scores = self.scores(hidden, head, labels)
        # Ranks along the tensor axis compute the same values; one of them reports them.
        if self.model.mesh.index("tensor") == 0:
            weights_T = labels.weights
            ones = torch.ones_like(scores.losses)
            weights = ones if weights_T is None else weights_T[scores.positions]
            weights = weights.double() * labels.weight_scale
            token_metrics = [scores.losses * weights, weights, ones, scores.is_correct]
            token_metrics += (scores.values * weights).unbind()
            metrics_SM = torch.stack([metric.double() for metric in token_metrics], dim=1)
            totals.index_add_(0, kinds_T[scores.positions], metrics_SM)
        return hidden.new_zeros((), dtype=torch.float32)
