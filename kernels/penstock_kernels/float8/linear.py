"""A linear layer with FP8 matmuls, forward and backward.

T rows of x, K columns in, N out.
"""

# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from penstock_kernels.custom_op import keep_inputs, operator
from penstock_kernels.float8.float8_matrix import Float8Matrix, shape_of_scales
from penstock_kernels.float8.matmuls import (
    ALONE,
    AmaxReduceGroups,
    Float8Recipe,
    gradients,
    outputs,
)
from penstock_kernels.float8.weight import Float8WeightShard


def linear(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    scheme: Float8Recipe,
    agreement: AmaxReduceGroups = ALONE,
) -> torch.Tensor:
    """`x W^T`, [..., N], of x [..., K] in its dtype, float32 or bfloat16, which is also the dtype
    of gradients.

    Compiled, it is one custom operator, and its gradients another; scales shared by ranks are then
    not supported.

    Raises:
        ValueError: x has other columns than W, or they are not whole blocks.
    """
    columns = weight_NK.shape[-1]
    if weight_NK.dim() != 2 or x.shape[-1] != columns:
        raise ValueError(f"x is {tuple(x.shape)}, and the matrix {tuple(weight_NK.shape)}")
    if scheme.block and columns % scheme.block:
        raise ValueError(f"{columns} columns are not whole blocks of {scheme.block}")
    x_TK = x.reshape(-1, columns)
    if torch.compiler.is_compiling():
        assert agreement == ALONE
        # FSDP gathers in FP8 only where layers are not compiled.
        assert not isinstance(weight_NK, Float8WeightShard)
        # An operator's schema has strings and numbers, and no dataclasses.
        fields = [scheme.recipe, scheme.gradients, scheme.input_gradient, scheme.weight_gradient]
        y_TN = _linear_of(x_TK, weight_NK, " ".join(fields), scheme.block or 0)[0]
    else:
        y_TN = _Linear.apply(x_TK, weight_NK, scheme, agreement)
    # FSDP warns about views.
    return y_TN if x.dim() == 2 else y_TN.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        scheme: Float8Recipe,
        agreement: AmaxReduceGroups,
    ) -> torch.Tensor:
        ctx.scheme, ctx.agreement = scheme, agreement
        y_TN, x, weight = outputs(x_TK, weight_NK, scheme, agreement)
        # Per-tensor codes serve both directions; other recipes quantize again.
        ctx.keeps_codes = x.sharing == "tensor" and scheme.weight_gradient == "quantized"
        saved = (x.codes, x.scales) if ctx.keeps_codes else (x_TK, None)
        learns = ctx.needs_input_grad[1]
        # Of the weight the scales, not the codes: those are made again, and no copy of it is kept.
        ctx.save_for_backward(weight_NK, weight.scales, *(saved if learns else (None, None)))
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        weight_NK, scales, x, x_scales = ctx.saved_tensors
        if x is not None and ctx.keeps_codes:
            x = Float8Matrix(x, x_scales, "tensor")
        needs_grad = ctx.needs_input_grad[:2]
        results = gradients(
            dy_TN, x, weight_NK, scales, ctx.scheme, ctx.agreement, needs_grad=needs_grad
        )
        return *results, None, None


def _scheme(fields: str, block: int) -> Float8Recipe:
    return Float8Recipe(*fields.split(), block=block or None)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, scheme: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, coded = outputs(x, weight, _scheme(scheme, block), ALONE)
    return y, coded.scales


def _forward_fake(
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
    needs_grad = wants_x, wants_weight
    results = gradients(dy, x, weight, scales, _scheme(scheme, block), ALONE, needs_grad=needs_grad)
    # A list of an operator's holds no None, and its tensors lie as those of the fake one do.
    return [gradient.contiguous() for gradient in results if gradient is not None]


def _gradients_fake(
    _: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any
) -> list[torch.Tensor]:
    sides = zip((x, weight), args[-2:], strict=True)
    return [operand.new_empty(operand.shape) for operand, is_wanted in sides if is_wanted]


def _back(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    needs_grad = ctx.needs_input_grad[:2]
    results = iter(_gradients_of(dy, *ctx.saved_tensors, *ctx.options, *needs_grad))
    return *(next(results) if is_wanted else None for is_wanted in needs_grad), None, None


_gradients_of = operator("float8_linear_gradients", _gradients, fake=_gradients_fake)
_linear_of = operator(
    "float8_linear", _forward, fake=_forward_fake, keep=keep_inputs(2, 1), backward=_back
)
