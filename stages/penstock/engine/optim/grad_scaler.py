"""Loss scaling for fp16 training, so that small gradients do not underflow.

The scale is halved when gradients overflow, and doubled after a while without overflow
(Micikevicius et al. 2018, "Mixed precision training").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.distributed.param_shards import LocalParam, local

GROWTH_INTERVAL = 2000
"""The number of steps without overflow after which the scale doubles."""
MIN_SCALE = 1.0
"""The smallest scale: an overflow below it is not caused by the scale."""


@dataclass
class GradScaler:
    """The loss scale, the same on every rank because it follows global norms."""

    scale: float
    quiet: int = 0
    """Steps since the last change."""

    @torch.no_grad()
    def unscale(self, params: Sequence[LocalParam]) -> None:
        """Divide all gradients by the scale, in place. Overflowed values stay infinite."""
        gradients = [local(one.parameter.grad) for one in params if one.parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)

    def on_finite_step(self) -> None:
        """Record a step with finite gradients."""
        self.quiet += 1
        if self.quiet == GROWTH_INTERVAL:
            self.scale, self.quiet = 2 * self.scale, 0

    def on_overflow(self) -> bool:
        """Record an overflow: halve the scale, and return whether that can help."""
        self.scale, self.quiet = self.scale / 2, 0
        return self.scale >= MIN_SCALE

    def as_json(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"scale": self.scale, "quiet": self.quiet}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.scale, self.quiet = state["scale"], state["quiet"]
