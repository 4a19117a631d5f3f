"""NovoGrad: Adam-like momentum of gradients normalized by their per-tensor second moment.

Ginsburg et al. 2019, "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of
Deep Networks" (arXiv 1905.11286), algorithm 1, as implemented in NeMo: eps is added after the
square root, new gradients are not scaled by 1 - beta1 unless `grad_averaging` is set, and weight
decay is added to the gradient before averaging. `amsgrad` divides by the largest norm so far.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.optim.anyprecision import StatePrecision, apply_update

# States with one number per tensor: the moving average of squared norms, and its maximum.
SQUARES, LARGEST = "grad_sq", "max_grad_sq"

PER_TENSOR_STATES = (SQUARES, LARGEST)


class Tensors(Protocol):
    """Maps parameters to the tensors that have a norm: a parameter may be several fused or stacked
    tensors, or a shard of one."""

    def parts(self, parameter: nn.Parameter, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Local shard of each tensor, or stack of n tensors, as a view [n, elements] of `tensor`.
        `tensor` has the shape of the parameter's local shard."""
        ...

    def square_norms(
        self, gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> Mapping[nn.Parameter, torch.Tensor]:
        """Squared gradient norm of each full tensor, fp32, in the order of `parts`, from local
        gradient shards. Collective: all ranks call it."""
        ...


class UnshardedTensors(Tensors):
    """For unsharded parameters: each is one tensor, or a stack of matrices [n, N, K]."""

    def parts(self, parameter: nn.Parameter, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.view(len(tensor) if parameter.ndim == 3 else 1, -1)]

    def square_norms(
        self, gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> Mapping[nn.Parameter, torch.Tensor]:
        return {
            parameter: squared(self.parts(parameter, gradient.contiguous())).float()
            for parameter, gradient in gradients.items()
        }


def squared(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Squared norm of each tensor of the parts [n, elements]; fp64, so that sums over ranks round
    to the same fp32 number in any order."""
    return torch.cat(
        [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square() for part in parts]
    )


class NovoGrad(torch.optim.Optimizer):
    """NovoGrad; each matrix of a stack has its own norm, as in a model without stacked weights."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        grad_averaging: bool,
        amsgrad: bool,
        precision: StatePrecision,
        tensors: Tensors,
        weight_decay: float = 0.0,
    ) -> None:
        self.precision, self._tensors = precision, tensors
        adam = {"lr": lr, "betas": betas, "eps": eps}
        flags = {"grad_averaging": grad_averaging, "amsgrad": amsgrad}
        super().__init__(params, {**adam, **flags, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        gradients = {
            parameter: self.precision.local(parameter.grad).contiguous()
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        squares = self._tensors.square_norms(gradients)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in gradients:
                    self._step(parameter, gradients[parameter], squares[parameter], group)

    def _step(
        self,
        parameter: nn.Parameter,
        gradient: torch.Tensor,
        squares: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        param_state, (beta1, _) = self.state[parameter], group["betas"]
        if not param_state:
            param_state["step"] = torch.zeros(())
            param_state["exp_avg"] = torch.zeros_like(parameter, dtype=self.precision.states)
            param_state[SQUARES] = torch.zeros_like(squares)
            if group["amsgrad"]:
                param_state[LARGEST] = torch.zeros_like(squares)
        param_state["step"] += 1
        # A copy, for it is divided in place, and the gradient is still the parameter's.
        direction = gradient.to(torch.float32, copy=True)
        parts = self._tensors.parts(parameter, direction)
        norms = _norms(param_state, squares, group).split([len(part) for part in parts])
        for part, norm in zip(parts, norms, strict=True):
            part.div_(norm[:, None])
        if group["weight_decay"]:
            weight = self.precision.local(parameter.detach())
            direction.add_(weight, alpha=group["weight_decay"])
        if group["grad_averaging"]:
            direction.mul_(1 - beta1)
        exp_avg = self.precision.local(param_state["exp_avg"])
        average = direction.add_(exp_avg, alpha=beta1)
        exp_avg.copy_(average)
        step = int(param_state["step"].item())
        apply_update(parameter, average, group["lr"], self.precision, step)


def _norms(
    param_state: Mapping[str, torch.Tensor], squares: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    """Denominators of gradients. The moving average is initialized with the first nonzero norm."""
    _, beta2 = group["betas"]
    average = param_state[SQUARES]
    average.copy_(torch.where(average == 0, squares, average.lerp(squares, 1 - beta2)))
    if group["amsgrad"]:
        average = torch.maximum(param_state[LARGEST], average, out=param_state[LARGEST])
    # Never divide by 0: with eps 0, a zero gradient must stay zero instead of becoming NaN.
    return average.sqrt().add_(group["eps"]).clamp_(min=torch.finfo(torch.float32).tiny)
