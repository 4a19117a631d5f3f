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
from penstock.engine.distributed.vocab_parallel import ScoresOf
from penstock.models.decoder import Reduce
from penstock.rows.collate import MicroBatch


@dataclass(frozen=True)
class EvalModel:
    """Runs forward passes for evaluation."""

    layout: ParallelModel
    ranks: ProcessInfo
    scores: ScoresOf

    @torch.no_grad()
    def counts(
        self, batches: Sequence[MicroBatch], kinds: Sequence[torch.Tensor], num_kinds: int
    ) -> torch.Tensor:
        """This rank's share, fp64 [num_kinds, 3]; the sum over all ranks is the result.

        For every kind of token: the summed cross-entropy, the number of trained tokens, and of
        those whose label is the most likely token. `kinds` has the kind of each batch's tokens [T],
        padding included.
        """
        found = torch.zeros(num_kinds, 3, dtype=torch.float64, device=self.ranks.device)
        self.layout.forward(
            [
                self._call(batch, partial(self._count, found, self._here(kinds_T), batch))
                for batch, kinds_T in zip(batches, kinds, strict=True)
            ]
        )
        return found

    def _count(
        self,
        found: torch.Tensor,
        kinds_T: torch.Tensor,
        batch: MicroBatch,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        scores = self.scores(hidden, head, self._here(batch.labels_T))
        # Ranks along the tensor axis compute the same values; one of them reports them.
        if self.layout.mesh.index("tensor") == 0:
            told = [scores.losses, torch.ones_like(scores.losses), scores.right.float()]
            found.index_add_(0, kinds_T[scores.places], torch.stack(told, dim=1).double())
        return hidden.new_zeros((), dtype=torch.float32)

    def _here(self, values_T: torch.Tensor) -> torch.Tensor:
        """This rank's part of a per-token tensor."""
        return self.layout.context.shard_tensor(values_T).to(self.ranks.device, non_blocking=True)

    def _call(self, batch: MicroBatch, reduce: Reduce) -> ModelInputs:
        return self.layout.build_inputs(batch, reduce, self.ranks.device)
