"""Muon: matrices move along the orthogonal matrix nearest to their momentum; the rest by AdamW.

Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the rate for
matrices of any shape of Liu et al. 2025, "Muon is scalable for LLM training".
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penstock.optim.anyprecision import StatePrecision, as_it_is, move_along, step_adamw
from penstock.optim.groups import MATRICES
from penstock_kernels.newton_schulz import each_by_shape, newton_schulz

Adjust = Literal["original", "match_rms_adamw"]

MomentumOf = Callable[[nn.Parameter], torch.Tensor]
"""A parameter to what its part here would move along, in bfloat16. To be asked once a step."""

Directions = Callable[
    [Sequence[nn.Parameter], MomentumOf], Iterable[tuple[nn.Parameter, torch.Tensor]]
]
"""From parameters and their momenta to each with what its part here does move along, in any
order. Whoever lays matrices out over ranks brings one of its own."""


@dataclass(frozen=True)
class Orthogonalizer:
    """How a matrix becomes the direction it moves in."""

    steps: int = 5
    adjust: Adjust = "original"

    def __call__(self, matrices_NK: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each whole matrix, in bfloat16."""
        return each_by_shape(matrices_NK, lambda stack: newton_schulz(stack, self.steps))

    def size(self, shape: Sequence[int]) -> float:
        """What a matrix's shape does to the rate. `original`: sqrt(max(1, N/K)), so that rows of a
        tall matrix move as far as those of a square one. `match_rms_adamw`: 0.2 sqrt(max(N, K)),
        which makes the root mean square of a step 0.2 times the rate, as AdamW's often is."""
        rows, columns = shape
        if self.adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


class Muon(torch.optim.Optimizer):
    """Groups with `matrices` are stepped by Muon, each matrix of a stack by itself, others by
    AdamW. Weight decay is a share of the rate in both."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        keeping: StatePrecision,
        directions: Directions,
    ) -> None:
        self.keeping, self._directions = keeping, directions
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": 0.0,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of every parameter. Those of AdamW without a gradient are left as they are."""
        assert closure is None
        group_of: dict[nn.Parameter, dict[str, Any]] = {}
        for group in self.param_groups:
            if group[MATRICES]:
                group_of.update(dict.fromkeys(group["params"], group))
            else:
                step_adamw(self.state, group, self.keeping)

        def momentum_of(parameter: nn.Parameter) -> torch.Tensor:
            return self._momentum(parameter, group_of[parameter])

        for parameter, direction in self._directions(list(group_of), momentum_of):
            group, step = group_of[parameter], int(self.state[parameter]["step"].item())
            kept = 1 - group["lr"] * group["weight_decay"]
            move_along(parameter, direction, group["lr"], self.keeping, step, kept=kept)

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Move the momentum towards the gradient, and look ahead once more if that is wanted."""
        its, local = self.state[parameter], self.keeping.local
        if not its:
            its["step"] = torch.zeros(())
            its["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.keeping.states)
        its["step"] += 1
        kept = local(its["momentum_buffer"])
        if parameter.grad is None:
            gradient = torch.zeros_like(kept, dtype=torch.float32)
        else:
            gradient = local(parameter.grad).float()
        now = kept if kept.dtype == torch.float32 else kept.float()
        now.lerp_(gradient, 1 - group["momentum"])
        if now is not kept:
            kept.copy_(now)
        ahead = gradient.lerp(now, group["momentum"]) if group["nesterov"] else now
        return ahead.bfloat16()


@dataclass(frozen=True)
class Alone:
    """Directions where every matrix is all here, by itself or in a stack [..., N, K]."""

    turning: Orthogonalizer
    local: Callable[[torch.Tensor], torch.Tensor] = as_it_is

    def __call__(
        self, parameters: Sequence[nn.Parameter], momentum_of: MomentumOf
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """One parameter after another."""
        for parameter in parameters:
            momentum = momentum_of(parameter)
            stack_BNK = momentum.view(-1, *momentum.shape[-2:])
            turned = torch.stack(self.turning(list(stack_BNK))).float()
            yield parameter, turned.view_as(momentum) * self.turning.size(momentum.shape[-2:])
