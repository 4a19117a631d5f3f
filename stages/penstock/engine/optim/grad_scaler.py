"""Loss scaling for fp16 training, so that small gradients do not underflow.

The scale is halved when gradients overflow, and doubled after a while without overflow
(Micikevicius et al. 2018, "Mixed precision training").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.step_part import StepPart, StepState

# As in torch.amp.GradScaler.
# The number of steps without overflow after which the scale doubles.
GROWTH_INTERVAL = 2000
# The smallest scale: an overflow below it is not caused by the scale.
MIN_SCALE = 1.0


@dataclass
class GradScaler(StepPart):
    """The loss scale, the same on every rank because it follows global norms."""

    scale: float
    quiet: int = 0
    params: Sequence[LocalParam] = field(default=(), repr=False)

    def before_forward(self, step: StepState) -> None:
        step.scale = self.scale

    @torch.no_grad()
    def after_backward(self, step: StepState) -> None:
        """Divide all gradients by the scale, in place. Overflowed values stay infinite."""
        parameters = [param.parameter for param in self.params]
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if gradients:
            # Exact if the scale is a power of two, as it is unless `loss_scale_init` is none.
            torch._foreach_mul_(gradients, 1 / step.scale)

    def skips_update(self, step: StepState) -> bool:
        """Halve the scale, and return whether that can help."""
        del step
        self.scale, self.quiet = self.scale / 2, 0
        return self.scale >= MIN_SCALE

    def after_update(self, step: StepState) -> None:
        del step
        self.quiet += 1
        if self.quiet == GROWTH_INTERVAL:
            self.scale, self.quiet = 2 * self.scale, 0

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        del totals
        return {"loss_scale": step.scale, "skipped": not step.is_finite}

    def as_json(self) -> dict[str, Any]:
        return {"scale": self.scale, "quiet": self.quiet}

    def restore(self, state: dict[str, Any]) -> None:
        self.scale, self.quiet = state["scale"], state["quiet"]
