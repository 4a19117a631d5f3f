"""What the loss is multiplied by so that small gradients are not lost in float16.

It goes down when gradients overflow, and up again after a while without that (Micikevicius et al.
2018, "Mixed precision training").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.distributed.param_shards import LocalParam, local

QUIET = 2000
"""Steps without an overflow after which it doubles."""
LEAST = 1.0
"""Below this what overflows is no matter of scale."""


@dataclass
class GradScaler:
    """The scale, the same on every rank: it follows norms that all of them have."""

    scale: float
    quiet: int = 0
    """Steps since it last changed."""

    @torch.no_grad()
    def unscale(self, held: Sequence[LocalParam]) -> None:
        """Divide all gradients by it, in place. What overflowed stays infinite."""
        gradients = [local(one.parameter.grad) for one in held if one.parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)

    def went_well(self) -> None:
        """A step's gradients were finite."""
        self.quiet += 1
        if self.quiet == QUIET:
            self.scale, self.quiet = 2 * self.scale, 0

    def can_give_way(self) -> bool:
        """A step's gradients were not finite: halve it, and say whether that can help."""
        self.scale, self.quiet = self.scale / 2, 0
        return self.scale >= LEAST

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "quiet": self.quiet}

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on where that was kept."""
        self.scale, self.quiet = kept["scale"], kept["quiet"]
