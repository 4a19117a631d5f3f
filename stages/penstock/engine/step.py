"""One optimizer step over micro-batches, and the loss it reports.

The loss is the sum of the cross-entropies of all trained tokens of the step, over every replica and
micro-batch, divided by their number. It does not depend on how the step was cut.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from penstock.core.errors import StageError
from penstock.engine.clip import gradient_norm, scale_gradients
from penstock.engine.parallel.data import accumulating, backward_scale
from penstock.engine.ranks import Ranks
from penstock.losses.cross_entropy import sum_cross_entropy
from penstock.rows.collate import MicroBatch
from penstock_kernels.attention import Segments


@dataclass(frozen=True)
class StepResult:
    """What one step reports; the same on every rank."""

    loss: float
    grad_norm: float
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class Engine:
    """A model laid out over ranks, and its optimizer: everything a step needs."""

    model: nn.Module
    """What forward is called on; it may be a wrapper."""
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    autocast: torch.dtype | None
    """Compute dtype where the layout does not cast by itself."""
    max_grad_norm: float

    def step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Forward, backward and update. Raises StageError if the gradients are not finite."""
        counts = self._count(batches)
        trained = max(1, int(counts[1]))
        total = torch.zeros((), device=self.ranks.device)
        scale = backward_scale(self.model, self.ranks.world)
        for index, batch in enumerate(batches):
            with accumulating(self.model, last=index == len(batches) - 1):
                loss = self._sum_of_losses(batch) / trained
                (loss * scale).backward()
            total += loss.detach()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = gradient_norm(parameters)
        if not torch.isfinite(norm):
            raise StageError(
                f"the gradient norm is {norm.item()}; the weights were left as they were.\n"
                "  Lower train.lr, or look at the data of this step; the last checkpoint is intact."
            )
        scale_gradients(parameters, norm, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.ranks.total(total).item()
        return StepResult(loss, norm.item(), int(counts[0]), int(counts[1]))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """The summed cross-entropy over all replicas' `batches`, and the trained tokens in them."""
        counts = self._count(batches)
        total = torch.zeros((), device=self.ranks.device, dtype=torch.float64)
        self.model.eval()
        for batch in batches:
            total += self._sum_of_losses(batch)
        self.model.train()
        return self.ranks.total(total).item(), int(counts[1])

    def _sum_of_losses(self, batch: MicroBatch) -> torch.Tensor:
        device = self.ranks.device
        labels = batch.labels_T.to(device, non_blocking=True)
        with self._casting():
            return self.model(
                batch.input_ids_T.to(device, non_blocking=True),
                batch.position_ids_T.to(device, non_blocking=True),
                Segments.of(batch.lengths, device),
                partial(sum_cross_entropy, labels_T=labels),
            )

    def _casting(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.autocast)

    def _count(self, batches: Sequence[MicroBatch]) -> list[int]:
        mine = [sum(b.num_tokens for b in batches), sum(b.num_trained for b in batches)]
        return self.ranks.total(torch.tensor(mine, device=self.ranks.device)).tolist()
