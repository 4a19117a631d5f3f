"""Zero gradients for parameters that a pass did not use, such as those of experts without tokens.

FSDP reduces the gradients of a unit together, so every rank must have the same ones.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Parameters = Callable[[], Iterable[nn.Parameter]]
"""Called in the backward pass, as FSDP replaces parameters."""


class _CompleteGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        ctx.parameters = parameters
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        for parameter in ctx.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return dx, None


def complete_gradients(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """The input of a layer, such that each of its parameters gets a gradient in the backward pass.

    The input gets a gradient even if nothing before the layer is trained.
    """
    if not torch.is_grad_enabled():
        return x
    # Autograd calls no backward of a function none of whose inputs requires a gradient.
    x = x if x.requires_grad else x.detach().requires_grad_()
    # Of the input: its backward is the last of the layer's, and the first before FSDP reduces the
    # layer's gradients.
    return _CompleteGradients.apply(x, layer.parameters)


def complete_part_gradients(y: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """The output of a model, such that each of these parameters gets a gradient in the backward
    pass: zeros, to which those that are computed are added."""
    if not (torch.is_grad_enabled() and y.requires_grad):
        return y
    return _CompleteGradients.apply(y, parameters)
