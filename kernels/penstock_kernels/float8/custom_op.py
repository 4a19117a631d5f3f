"""An FP8 linear layer for torch.compile: one custom operator, and one for its gradients.

T rows of x, K columns in, N out.
"""

# pyright: reportArgumentType=false

from typing import Any

import torch

from penstock_kernels.custom_op import operator
from penstock_kernels.float8.float8_matrix import shape_of_scales
from penstock_kernels.float8.matmuls import ALONE, Float8Recipe, gradients, outputs


def _linear(
    x: torch.Tensor, weight: torch.Tensor, scheme: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, coded = outputs(x, weight, _scheme(scheme, block), ALONE)
    return y, coded.scales


def _linear_fake(
    x: torch.Tensor, weight: torch.Tensor, scheme: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = shape_of_scales(_scheme(scheme, block).of_weights, *weight.shape)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    return y, x.new_empty(shape, dtype=torch.float32)


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    scheme: str,
    block: int,
    wants_x: bool,
    wants_weight: bool,
) -> list[torch.Tensor]:
    results = gradients(
        dy, x, weight, scales, _scheme(scheme, block), ALONE, needs_grad=(wants_x, wants_weight)
    )
    # A list of an operator's holds no None, and its tensors lie as those of the fake one do.
    return [gradient.contiguous() for gradient in results if gradient is not None]


def _gradients_fake(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any
) -> list[torch.Tensor]:
    del dy
    *_, wants_x, wants_weight = args
    sides = ((x, wants_x), (weight, wants_weight))
    return [operand.new_empty(operand.shape) for operand, is_wanted in sides if is_wanted]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.scheme, ctx.block = inputs
    ctx.save_for_backward(x, weight, output[1])


def _back(ctx: Any, dy: torch.Tensor, dscales: Any) -> tuple[torch.Tensor | None, ...]:
    del dscales
    needs_grad = ctx.needs_input_grad[:2]
    results = iter(_gradients_of(dy, *ctx.saved_tensors, ctx.scheme, ctx.block, *needs_grad))
    return *(next(results) if is_wanted else None for is_wanted in needs_grad), None, None


_gradients_of = operator("float8_linear_gradients", _gradients, fake=_gradients_fake)
_linear_of = operator("float8_linear", _linear, fake=_linear_fake, keep=_keep, backward=_back)


def float8_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, scheme: Float8Recipe
) -> torch.Tensor:
    """x W^T, [T, N], with its gradients."""
    fields = [scheme.recipe, scheme.gradients, scheme.input_gradient, scheme.weight_gradient]
    return _linear_of(x_TK, weight_NK, " ".join(fields), scheme.block or 0)[0]


def _scheme(fields: str, block: int) -> Float8Recipe:
    return Float8Recipe(*fields.split(), block=block or None)
