"""AdamW whose weights and states are each kept in float32 or bfloat16.

It computes in float32. What is kept in bfloat16 is rounded to the nearest, or at random such that
small steps are not lost; or what rounding takes from weights is kept beside them (Kahan 1965).
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penstock_kernels.adamw import RowKeys, Settings, Stepped, adamw_, adamw_each_
from penstock_kernels.stochastic_rounding import stochastic_round

Rounding = Callable[[nn.Parameter, int], tuple[Sequence[RowKeys], int]]
"""Of a parameter and the step, from 1: whose the rows of its part here are, and the number of its
first column. Those of a vector are its numbers, each a row of its own."""

State = MutableMapping[Any, dict[str, torch.Tensor]]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """For parameters that are all here."""
    return tensor


@dataclass(frozen=True)
class StatePrecision:
    """In what an optimizer keeps what it keeps."""

    states: torch.dtype = torch.float32
    lost: Literal["forgotten", "kept"] = "forgotten"
    """What becomes of what rounding takes from weights."""
    rounding: Rounding | None = None
    """None where everything is rounded to the nearest."""
    local: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """The part of a parameter, a gradient or a state that is here."""


class AnyPrecisionAdamW(torch.optim.Optimizer):
    """AdamW, as `step_adamw` says."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        keeping: StatePrecision,
        weight_decay: float = 0.0,
    ) -> None:
        self.keeping = keeping
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            step_adamw(self.state, group, self.keeping)


def step_adamw(state: State, group: dict[str, Any], keeping: StatePrecision) -> None:
    """One step of a group's parameters (Loshchilov and Hutter 2019, algorithm 2, where decay is a
    share of the rate).

    `state` has for each, under the names that torch's AdamW has, the moments and the number of
    steps; and `lost`, where that is kept.
    """
    at_step: dict[int, list[tuple[nn.Parameter, Stepped]]] = {}
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        its = state[parameter]
        if not its:
            its.update(_beginning(parameter, keeping))
        its["step"] += 1
        lost = its.get("lost")
        stepped = Stepped(
            keeping.local(parameter.detach()),
            keeping.local(parameter.grad).contiguous(),
            keeping.local(its["exp_avg"]),
            keeping.local(its["exp_avg_sq"]),
            None if lost is None else keeping.local(lost),
        )
        at_step.setdefault(int(its["step"].item()), []).append((parameter, stepped))
    for number, pairs in at_step.items():
        beta1, beta2 = group["betas"]
        now = Settings(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], number)
        if keeping.rounding is None:
            adamw_each_([stepped for _, stepped in pairs], now, adamw_)
            continue
        for parameter, stepped in pairs:
            if not stepped.weight.numel():
                continue
            runs, first_column = keeping.rounding(parameter, number)
            weight, gradient, first, second = (view_2d(part) for part in stepped[:4])
            adamw_(weight, gradient, first, second, now, runs, first_column)


def move_along(
    parameter: nn.Parameter,
    direction: torch.Tensor,
    lr: float,
    keeping: StatePrecision,
    step: int,
    *,
    kept: float = 1.0,
) -> None:
    """Move what is here of a parameter, of which `kept` is a share, against a direction in fp32.

    `step`, from 1, decides what is drawn where weights are rounded at random.
    """
    weight = keeping.local(parameter.detach())
    if not weight.numel():
        return
    if weight.dtype == torch.float32:
        weight.mul_(kept).add_(direction, alpha=-lr)
        return
    moved = weight.float().mul_(kept).add_(direction, alpha=-lr)
    if keeping.rounding is not None:
        runs, first_column = keeping.rounding(parameter, step)
        moved = stochastic_round(view_2d(moved), runs, first_column).view_as(weight)
    weight.copy_(moved)


def view_2d(tensor: torch.Tensor) -> torch.Tensor:
    """A view of it as rows and columns; each number of a vector is a row."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.view(-1, 1)


def _beginning(parameter: nn.Parameter, keeping: StatePrecision) -> dict[str, torch.Tensor]:
    """A parameter's state before its first step."""
    found = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(parameter, dtype=keeping.states),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=keeping.states),
    }
    if keeping.lost == "kept" and parameter.dtype == torch.bfloat16:
        found["lost"] = torch.zeros_like(parameter)
    return found
