"""Zero gradients for parameters that a pass did not use, such as those of experts without tokens.

FSDP reduces the gradients of a unit together, so every rank must have the same ones.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class _CompleteGradients(torch.autograd.Function):
    """Returns the layer's input unchanged. Its backward is the last of the layer's, and the first
    before FSDP reduces the layer's gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        for parameter in ctx.layer.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return dx, None


def complete_gradients(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """The input of a layer, such that each of its parameters gets a gradient in the backward pass.

    The input gets a gradient even if nothing before the layer is trained.
    """
    if not torch.is_grad_enabled():
        return x
    x = x if x.requires_grad else x.detach().requires_grad_()
    return _CompleteGradients.apply(x, layer)


class _CompletePartGradients(torch.autograd.Function):
    """Returns its input unchanged. Its backward is one of the first of the model's."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, parameters: Callable[[], Iterable[nn.Parameter]]
    ) -> torch.Tensor:
        ctx.parameters = parameters
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        for parameter in ctx.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return dy, None


def complete_part_gradients(
    y: torch.Tensor, parameters: Callable[[], Iterable[nn.Parameter]]
) -> torch.Tensor:
    """The output of a model, such that each of these parameters gets a gradient in the backward
    pass: zeros, to which those that are computed are added."""
    if not (torch.is_grad_enabled() and y.requires_grad):
        return y
    return _CompletePartGradients.apply(y, parameters)
