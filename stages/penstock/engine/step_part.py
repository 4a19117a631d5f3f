"""Parts of a train step: each optional feature of a run is one object, called at fixed moments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.engine.distributed.parallel_model import ModelInputs, ParallelModel
from penstock.models.decoder import OutputFn
from penstock.rows.collate import MicroBatch


@dataclass(frozen=True)
class TokenCounts:
    """Tokens and trained tokens of a step, over all replicas."""

    tokens: int
    trained: int
    loss_weight: float
    """Sum of the loss weights of the trained tokens."""
    sub_batches: tuple[int, ...] = ()
    """The most sub-batches that a rank needs of each micro-batch; none where they are not split."""

    @property
    def divisor(self) -> float:
        """What summed losses are divided by; 1 without a trained token."""
        return self.loss_weight or 1.0


@dataclass
class StepState:
    """A step while it runs: what its parts read, and what they leave for those after them."""

    model: ParallelModel
    number: int
    """From 0."""
    batches: Sequence[MicroBatch]
    """This rank's micro-batches, after splitting by length."""
    counts: TokenCounts
    calls: list[ModelInputs]
    """The model's inputs of each micro-batch; without a loss until a part sets one."""
    references: Sequence[torch.Tensor] = ()
    """Reference log-probs of each micro-batch's completions, [D, A]; empty without a reference."""
    measures_changes: bool = False
    scale: float = 1.0
    """The loss scale: losses and gradients are multiplied by it until they are unscaled."""
    has_loss: bool = True
    """False: the step has no trained token."""
    grad_norm: float = math.nan
    """Known from the update on."""
    changed_weights: float | None = None
    """The share of the sampled weights with a gradient that the update changed."""

    @property
    def is_finite(self) -> bool:
        """Whether the gradients are; otherwise the weights are not updated."""
        return math.isfinite(self.grad_norm)

    def set_output_fns(self, output_fns: Sequence[OutputFn]) -> None:
        pairs = zip(self.calls, output_fns, strict=True)
        self.calls = [replace(call, output_fn=output_fn) for call, output_fn in pairs]


class StepPart:
    """One feature of a step. Every moment is called on all ranks, and may be collective."""

    def before_forward(self, step: StepState) -> None:
        """Set the loss or extend `step.calls`."""

    def after_backward(self, step: StepState) -> torch.Tensor | None:
        """With all gradients, before their norm is computed. Returns what is summed over ranks and
        read together with the loss, fp64 [M]."""

    def skips_update(self, step: StepState) -> bool:
        """Called if gradients are not finite: whether the run goes on without this update."""
        del step
        return False

    def before_update(self, step: StepState) -> None:
        """Before the optimizer's step; not called if the update is skipped."""

    def after_update(self, step: StepState) -> None:
        """After the optimizer's step; not called if the update is skipped."""

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        """After the gradients were freed, on skipped updates too. Returns metrics by name, the same
        on every rank, from `totals`: the sums of what `after_backward` returned."""
        del step, totals
        return {}
