"""One optimizer step over micro-batches, and the losses it reports.

The loss is the sum of the losses of all trained tokens of the step, over every rank and
micro-batch, divided by their number. It does not depend on how the step was cut. What routers add
to it is told beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.core.errors import StageError
from penstock.engine.clip import gradient_norm, scale_gradients
from penstock.engine.merging import Merging
from penstock.engine.parallel.call import Call
from penstock.engine.parallel.layout import Layout
from penstock.engine.parallel.vocabulary import SumOfLosses
from penstock.engine.ranks import Ranks
from penstock.engine.routers import Routers
from penstock.models.layers.dropout import Noise
from penstock.optim.groups import RATE
from penstock.rows.collate import MicroBatch


@dataclass(frozen=True)
class StepResult:
    """What one step reports; the same on every rank."""

    loss: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    of_routers: Mapping[str, Any]
    """What there is to tell of them, by name: losses beside `loss`, and how they chose."""


@dataclass(frozen=True)
class Engine:
    """A model laid out over ranks, and its optimizer: everything a step needs."""

    layout: Layout
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    sum_of_losses: SumOfLosses
    told_losses: SumOfLosses
    """What validation tells."""
    max_grad_norm: float
    noise_seed: int | None = None
    """What dropout is drawn from; None where nothing is dropped."""
    routers: Routers | None = None
    """None where a step has nothing to do with them."""
    merging: Merging | None = None
    """None where adapters stay apart from the weights."""

    def step(self, batches: Sequence[MicroBatch], lr: float, number: int) -> StepResult:
        """Forward, backward and update, of the step with this number, from 0, which decides what
        is dropped and whether adapters are merged. Raises StageError if the gradients are not
        finite.
        """
        tokens, trained = self._count(batches)
        calls = [
            self._call(batch, self.sum_of_losses, max(1, trained), self._noise(batch, number))
            for batch in batches
        ]
        self.ranks.pulse.begins("forward and backward")
        if self.routers:
            layout = self.layout
            calls = self.routers.watching(calls, batches, tokens, layout.context, layout.observe)
        mine = self.layout.forward_backward(calls)
        self.ranks.pulse.begins("update")
        trainable = self.layout.trainable
        norm = gradient_norm(trainable, self.ranks)
        if not torch.isfinite(norm):
            raise StageError(
                f"the gradient norm is {norm.item()}; the weights were left as they were.\n"
                "  Lower train.lr, or look at the data of this step; the last checkpoint is intact."
            )
        scale_gradients(trainable, norm, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group[RATE]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.merging and self.merging.is_due(number + 1):
            self.ranks.pulse.begins("merging adapters")
            self.merging.merge(number + 1)
        told = self.routers.conclude(tokens) if self.routers else {}
        return StepResult(self.ranks.total(mine).item(), norm.item(), tokens, trained, told)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """The summed cross-entropy over all replicas' `batches`, and the trained tokens in them."""
        _, trained = self._count(batches)
        mine = self.layout.forward(
            [self._call(batch, self.told_losses, 1, None) for batch in batches]
        )
        return self.ranks.total(mine).item(), trained

    def _noise(self, batch: MicroBatch, step: int) -> Noise | None:
        if self.noise_seed is None:
            return None
        places_T = self.layout.context.part(batch.places())
        return Noise(self.noise_seed, step, places_T.to(self.ranks.device, non_blocking=True))

    def _call(
        self, batch: MicroBatch, summed: SumOfLosses, divisor: int, noise: Noise | None
    ) -> Call:
        device, context = self.ranks.device, self.layout.context
        part = context.mine(batch)
        labels_T = part.labels_T.to(device, non_blocking=True)

        def reduce(hidden_TD: torch.Tensor, head: nn.Module) -> torch.Tensor:
            return summed(hidden_TD, head, labels_T) / divisor

        return Call(
            part.input_ids_T.to(device, non_blocking=True),
            part.position_ids_T.to(device, non_blocking=True),
            context.segments(batch.lengths, device),
            reduce,
            noise,
        )

    def _count(self, batches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Tokens and trained tokens of all replicas; each rank that shares one counts it."""
        mine = [sum(b.num_tokens for b in batches), sum(b.num_trained for b in batches)]
        counted = self.ranks.total(torch.tensor(mine, device=self.ranks.device))
        tokens, trained = (counted // self.layout.ranks_per_replica).tolist()
        return tokens, trained
