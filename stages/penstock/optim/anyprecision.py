"""AdamW with weights and optimizer states in float32 or bfloat16.

Updates are computed in float32. bfloat16 tensors are rounded to nearest or stochastically (so that
small updates are not lost), or the rounding error of weights is stored (Kahan summation, 1965).
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

import torch
from torch import nn

from penstock_kernels.adamw import (
    RowKeys,
    Settings,
    StepTensors,
    adamw_,
    adamw_foreach_,
    copy_tables,
)
from penstock_kernels.stochastic_rounding import stochastic_round

Rounding = Callable[[nn.Parameter, int], tuple[Sequence[RowKeys], int]]
"""(parameter, step from 1) -> (random keys of the rows of its local shard, index of its first
column), for stochastic rounding. Each element of a vector is a row."""

State = MutableMapping[Any, dict[str, torch.Tensor]]


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """Identity, for parameters that are not sharded."""
    return tensor


@dataclass(frozen=True)
class StatePrecision:
    """Precision of optimizer states and rounding of weights."""

    states: torch.dtype = torch.float32
    lost: Literal["forgotten", "kept"] = "forgotten"
    rounding: Rounding | None = None
    """Stochastic rounding; None: round to nearest."""
    local: Callable[[torch.Tensor], torch.Tensor] = identity


class AnyPrecisionAdamW(torch.optim.Optimizer):
    """AdamW in the precisions of `precision`; see `step_adamw`."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        precision: StatePrecision,
        weight_decay: float = 0.0,
    ) -> None:
        self.precision = precision
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            step_adamw(self.state, group, self.precision)


def step_adamw(state: State, group: dict[str, Any], precision: StatePrecision) -> None:
    """AdamW update of a parameter group (Loshchilov and Hutter 2019, algorithm 2, with weight decay
    multiplied by the learning rate).

    `state` of each parameter has the same names as torch's AdamW (`step`, `exp_avg`,
    `exp_avg_sq`), and `lost` with Kahan summation.
    """
    # Bias correction counts a parameter's own steps: one without a gradient has fewer than others.
    params_by_step: dict[int, list[tuple[nn.Parameter, StepTensors]]] = {}
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        param_state = state[parameter]
        if not param_state:
            param_state.update(_initial_state(parameter, precision))
        param_state["step"] += 1
        lost = param_state.get("lost")
        update = StepTensors(
            precision.local(parameter.detach()),
            precision.local(parameter.grad).contiguous(),
            precision.local(param_state["exp_avg"]),
            precision.local(param_state["exp_avg_sq"]),
            None if lost is None else precision.local(lost),
        )
        params_by_step.setdefault(int(param_state["step"].item()), []).append((parameter, update))
    for number, pairs in params_by_step.items():
        beta1, beta2 = group["betas"]
        settings = Settings(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], number)
        if precision.rounding is None:
            adamw_foreach_([update for _, update in pairs], settings, adamw_)
            continue
        # FSDP leaves a rank no rows of a parameter that has fewer of them than there are ranks.
        pairs = [pair for pair in pairs if pair[1].weight.numel()]
        roundings = [precision.rounding(parameter, number) for parameter, _ in pairs]
        # One copy to the device, where each of hundreds would wait for the last.
        devices = {update.weight.device for _, update in pairs}
        tables: Iterable[torch.Tensor | None] = repeat(None, len(pairs))
        if len(devices) == 1:
            tables = copy_tables([runs for runs, _ in roundings], devices.pop())
        for (_, update), (runs, first_column), table in zip(pairs, roundings, tables, strict=True):
            weight, gradient, first, second = (view_2d(part) for part in update[:4])
            adamw_(weight, gradient, first, second, settings, runs, first_column, table=table)


def apply_update(
    parameter: nn.Parameter,
    direction: torch.Tensor,
    lr: float,
    precision: StatePrecision,
    step: int,
    *,
    decay: float = 1.0,
) -> None:
    """Update the local shard of a parameter in place: weight * decay - lr * direction, in fp32.
    `step`, from 1, selects the random numbers of stochastic rounding."""
    weight = precision.local(parameter.detach())
    if not weight.numel():
        return
    if weight.dtype == torch.float32:
        weight.mul_(decay).add_(direction, alpha=-lr)
        return
    moved = weight.float().mul_(decay).add_(direction, alpha=-lr)
    if precision.rounding is not None:
        runs, first_column = precision.rounding(parameter, step)
        moved = stochastic_round(view_2d(moved), runs, first_column).view_as(weight)
    weight.copy_(moved)


def view_2d(tensor: torch.Tensor) -> torch.Tensor:
    """A 2-D view of the tensor; each element of a vector is a row."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.view(-1, 1)


def _initial_state(parameter: nn.Parameter, precision: StatePrecision) -> dict[str, torch.Tensor]:
    param_state = {
        # On the CPU, as torch.optim keeps it: reading it does not wait for the device.
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(parameter, dtype=precision.states),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=precision.states),
    }
    if precision.lost == "kept" and parameter.dtype == torch.bfloat16:
        param_state["lost"] = torch.zeros_like(parameter)
    return param_state
