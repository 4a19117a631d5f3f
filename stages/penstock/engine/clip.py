"""One gradient norm over everything that is trained, each parameter counted once."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The L2 norm of all gradients, fp32 scalar, the same on every rank.

    Gradients are grouped by mesh and placement: torch's own total norm refuses to mix those.
    """
    groups: dict[object, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            layout = (
                (gradient.device_mesh, gradient.placements)
                if isinstance(gradient, DTensor)
                else None
            )
            groups[layout].append(gradient)
    squares: list[torch.Tensor] = []
    for gradients in groups.values():
        norm = torch.nn.utils.get_total_norm(gradients)
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


@torch.no_grad()
def scale_gradients(
    parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float
) -> None:
    """Shrink all gradients so that their norm is at most `max_norm`; 0 or less leaves them."""
    if max_norm <= 0:
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for p in parameters
        if p.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
