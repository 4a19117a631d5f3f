"""Muon: orthogonalized momentum (Newton-Schulz) for hidden matrices, AdamW for other parameters.

Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the learning rate
adjustment by shape is from Liu et al. 2025, "Muon is scalable for LLM training".
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penstock.optim.anyprecision import StatePrecision, apply_update, identity, step_adamw
from penstock.optim.groups import MATRICES
from penstock_kernels.newton_schulz import each_by_shape, newton_schulz

Adjust = Literal["original", "match_rms_adamw"]

MomentumFn = Callable[[nn.Parameter], torch.Tensor]
"""Parameter -> momentum of its local shard, in bfloat16. Updates the momentum buffer, so call it
once per step."""

Directions = Callable[
    [Sequence[nn.Parameter], MomentumFn], Iterable[tuple[nn.Parameter, torch.Tensor]]
]
"""(parameters, momentum function) -> (parameter, update direction of its local shard), in any
order. Sharded matrices need a distributed implementation."""


@dataclass(frozen=True)
class Orthogonalizer:
    """Orthogonalization settings: Newton-Schulz steps and learning rate adjustment."""

    steps: int = 5
    adjust: Adjust = "original"

    def __call__(self, matrices_NK: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Orthogonalize each (unsharded) matrix, in bfloat16."""
        return each_by_shape(matrices_NK, lambda stack: newton_schulz(stack, self.steps))

    def size(self, shape: Sequence[int]) -> float:
        """Learning rate factor of a matrix [N, K]. `original`: sqrt(max(1, N/K)), so that rows of a
        tall matrix move as far as those of a square one. `match_rms_adamw`: 0.2 sqrt(max(N, K)), so
        that the RMS of the update is 0.2 times the learning rate, as is typical of AdamW."""
        rows, columns = shape
        if self.adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


class Muon(torch.optim.Optimizer):
    """Muon for groups with `matrices` (each matrix of a stack separately), AdamW for the others.
    Weight decay is decoupled and multiplied by the learning rate in both."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        precision: StatePrecision,
        directions: Directions,
    ) -> None:
        self.precision, self._directions = precision, directions
        adam = {"lr": lr, "betas": betas, "eps": eps}
        muon = {"momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**adam, **muon, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter. AdamW parameters without a gradient are not changed."""
        assert closure is None
        group_by_param: dict[nn.Parameter, dict[str, Any]] = {}
        for group in self.param_groups:
            if group[MATRICES]:
                group_by_param.update(dict.fromkeys(group["params"], group))
            else:
                step_adamw(self.state, group, self.precision)

        def momentum_fn(parameter: nn.Parameter) -> torch.Tensor:
            return self._momentum(parameter, group_by_param[parameter])

        for parameter, direction in self._directions(list(group_by_param), momentum_fn):
            group, step = group_by_param[parameter], int(self.state[parameter]["step"].item())
            decay = 1 - group["lr"] * group["weight_decay"]
            apply_update(parameter, direction, group["lr"], self.precision, step, decay=decay)

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum buffer, and return it, or the Nesterov momentum, in bfloat16."""
        param_state, local = self.state[parameter], self.precision.local
        if not param_state:
            param_state["step"] = torch.zeros(())
            buffer = torch.zeros_like(parameter, dtype=self.precision.states)
            param_state["momentum_buffer"] = buffer
        param_state["step"] += 1
        buffer = local(param_state["momentum_buffer"])
        # Ranks orthogonalize a matrix together, so that each needs a momentum of its shard.
        if parameter.grad is None:
            gradient = torch.zeros_like(buffer, dtype=torch.float32)
        else:
            gradient = local(parameter.grad).float()
        momentum = buffer if buffer.dtype == torch.float32 else buffer.float()
        # An average, as in Jordan's code; the scale is lost in the orthogonalization anyway.
        momentum.lerp_(gradient, 1 - group["momentum"])
        if momentum is not buffer:
            buffer.copy_(momentum)
        ahead = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return ahead.bfloat16()


@dataclass(frozen=True)
class UnshardedDirections:
    """Update directions of unsharded matrices, single or in a stack [..., N, K]."""

    orthogonalizer: Orthogonalizer
    local: Callable[[torch.Tensor], torch.Tensor] = identity

    def __call__(
        self, parameters: Sequence[nn.Parameter], momentum_fn: MomentumFn
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for parameter in parameters:
            momentum = momentum_fn(parameter)
            stack_BNK = momentum.view(-1, *momentum.shape[-2:])
            update = torch.stack(self.orthogonalizer(list(stack_BNK))).float().view_as(momentum)
            yield parameter, update * self.orthogonalizer.size(momentum.shape[-2:])
