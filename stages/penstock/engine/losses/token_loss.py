"""The loss of a step over tokens: their summed losses, divided by the sum of their loss weights.

The divisor is the sum over all ranks, which `TrainStep` reads before the step (`TokenCounts`).
"""

from dataclasses import dataclass

import torch
from torch import nn

from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import SumLossFn
from penstock.engine.step_part import StepPart, StepState
from penstock.models.decoder import OutputFn
from penstock.rows.collate import MicroBatch


@dataclass(frozen=True)
class TokenLoss(StepPart):
    """A loss of each token, summed in a parallelized model."""

    layout: ParallelModel
    ranks: ProcessInfo
    loss_fn: SumLossFn

    def before_forward(self, step: StepState) -> None:
        divisor = step.counts.divisor / step.scale
        step.set_output_fns([self.output_fn(batch, divisor) for batch in step.batches])

    def output_fn(self, batch: MicroBatch, divisor: float) -> OutputFn:
        """Function to this rank's summed token losses over `divisor`."""
        labels = self.layout.context.shard_labels(batch, self.ranks.device)

        def output_fn(hidden_TD: torch.Tensor, head: nn.Module) -> torch.Tensor:
            return self.loss_fn(hidden_TD, head, labels, scale=1 / divisor)

        return output_fn
