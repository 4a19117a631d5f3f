"""Gradient clipping by global norm; each element counts once, however it is sharded."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.step_part import StepPart, StepState


@torch.no_grad()
def gradient_norm(params: Iterable[LocalParam], ranks: ProcessInfo) -> torch.Tensor:
    """The L2 norm of all gradients, fp32 scalar, the same on every rank. A shard that several ranks
    hold is divided by their number, so one all-reduce is right for every layout."""
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    for param in params:
        if param.parameter.grad is None:
            continue
        gradient = local(param.parameter.grad)
        if param.num_copies is not None:
            by_copies[param.num_copies].append(gradient)
            continue
        for piece in param.shards:
            by_copies[param.num_replicas * piece.num_copies].append(piece.view(gradient))
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for copies, gradients in by_copies.items():
        # Of 16-bit gradients norms would be rounded to 16 bits.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        # fp64: a square of an fp32 norm may overflow.
        squares = torch.stack(list(norms)).double().square().sum()
        total += squares.to(ranks.device) / copies
    return ranks.all_reduce_sum(total).sqrt().float()


@torch.no_grad()
def scale_gradients(params: Iterable[LocalParam], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`; 0 or less disables clipping."""
    # In fp32, as on the device. With a Python scalar _foreach_mul_ takes its fused path; with a
    # tensor it launches a kernel for each gradient.
    # 1e-6 as in `torch.nn.utils.clip_grad_norm_`.
    factor = (max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)).item()
    if max_norm <= 0 or factor >= 1:
        return
    gradients = [
        local(param.parameter.grad) for param in params if param.parameter.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, factor)


@dataclass(frozen=True)
class GradClipping(StepPart):
    """Clips the gradients of a run before each update."""

    params: Sequence[LocalParam]
    max_norm: float

    def before_update(self, step: StepState) -> None:
        scale_gradients(self.params, step.grad_norm, self.max_norm)
