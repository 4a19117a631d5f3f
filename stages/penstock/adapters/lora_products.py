"""Frozen linear layers of one input with their low-rank products, as one node of the graph.

`y = x W^T + s (x A^T) B^T` of each layer, where A has the rows of all layers' parts. The backward
pass adds `s (dy B) A` to the gradient of x as the epilogue of its product, and computes no gradient
of W. Separate nodes took three launches more for each part, and added gradients of x one by one.

T tokens, K features of the input, N of a part's output, r the rank, R the sum of the ranks.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from penstock.adapters.factor_copies import Factors, Layers, cast_factors, parameters_of
from penstock.models.layers.quantized_linear import QuantizedMatrix, affine
from penstock_kernels.cross_entropy.gradients import scaled_product_
from penstock_kernels.packed_linear import is_packed

if TYPE_CHECKING:
    from penstock.adapters.lora import LoraLinear


class _Part(NamedTuple):
    """An adapted part of a layer: its columns of the layer's output and of `x A^T`."""

    first: int
    width: int
    first_rank: int
    rank: int
    scale: float
    b_Nr: torch.Tensor  # noqa: N815 - Nr names the dimensions

    def of_output(self, y_TN: torch.Tensor) -> torch.Tensor:
        is_whole = self.width == y_TN.shape[1]
        return y_TN if is_whole else y_TN.narrow(1, self.first, self.width)

    def of_down(self, down_TR: torch.Tensor) -> torch.Tensor:
        is_whole = self.rank == down_TR.shape[1]
        return down_TR if is_whole else down_TR.narrow(1, self.first_rank, self.rank)


class _Layer(NamedTuple):
    parts: Sequence[_Part]
    weight: Callable[[torch.dtype], torch.Tensor]
    """The weight in a dtype, for the backward pass."""


def joint_outputs(layers: Layers, x_TK: torch.Tensor) -> Sequence[torch.Tensor] | None:
    """The outputs of layers of one input, [T, K], in the dtype of its products; None where
    `LoraLinear.forward` must compute each of them."""
    dtype = _compute_dtype(layers, x_TK)
    if dtype is None:
        return None
    x_TK = x_TK.to(dtype)
    copies = layers[0].copies
    factors = copies.get(layers, dtype) if copies else cast_factors(layers, dtype)
    a_rK, b_Nr = parameters_of(layers)
    down_TR = _Down.apply(x_TK, factors.a_RK, *a_rK)
    return _Products.apply(x_TK, down_TR, down_TR.grad_fn, layers, factors, *a_rK, *b_Nr)


def _compute_dtype(layers: Layers, x_TK: torch.Tensor) -> torch.dtype | None:
    """The dtype of all products, or None where they are computed one by one: in compiled code, with
    dropout, magnitudes, trained biases or products in fp8, and in several dtypes."""
    if torch.compiler.is_compiling() or x_TK.ndim != 2:
        return None
    device = x_TK.device.type
    is_cast = torch.is_autocast_enabled(device) and x_TK.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if is_cast else x_TK.dtype
    for layer in layers:
        bias = layer.bias
        if (
            not layer.is_fusable
            or layer.affine is not affine
            or (bias is not None and bias.requires_grad)
        ):
            return None
        if not is_cast and not _computes_in(layer, dtype):
            # fp32 matrices beside a bf16 weight keep their precision.
            return None
    return dtype


def _computes_in(layer: "LoraLinear", dtype: torch.dtype) -> bool:
    weights = [] if isinstance(layer.weight, QuantizedMatrix) else [layer.weight]
    biases = [] if layer.bias is None else [layer.bias]
    factors = (*layer.lora_A.values(), *layer.lora_B.values())
    return all(tensor.dtype == dtype for tensor in (*weights, *biases, *factors))


class _Down(torch.autograd.Function):
    """`x A^T`, [T, R]. It saves what the backward pass of `_Products` reads.

    A node saves tensors when its forward pass has ended. Recomputation stops after the last saved
    tensor: so it does not compute the last product with W of what is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, a_RK: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        del parameters  # they make this a node of the graph where x needs no gradient
        down_TR = x_TK @ a_RK.mT
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TK, a_RK, down_TR)
        return down_TR

    @staticmethod
    def backward(ctx: Any, d_down: torch.Tensor | None) -> tuple[None, ...]:
        assert d_down is None, "`_Products` returns the gradients of x and A"
        return (None,) * len(ctx.needs_input_grad)


class _Products(torch.autograd.Function):
    """The outputs of the layers, of x, `x A^T`, the node that saved both, and the parameters A and
    B, which get gradients of the products with their copies."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        down_TR: torch.Tensor,
        saved: Any,
        layers: Layers,
        factors: Factors,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.saved, ctx.layers = saved, _describe(layers, factors)
        ctx.dtypes = [parameter.grad_dtype or parameter.dtype for parameter in parameters]
        outputs: list[torch.Tensor] = []
        for layer, (parts, _) in zip(layers, ctx.layers, strict=True):
            y_TN = _base_output(layer, x_TK)
            for part in parts:
                h_Tr = part.of_down(down_TR)
                part.of_output(y_TN).addmm_(h_Tr, part.b_Nr.mT, alpha=part.scale)
            outputs.append(y_TN)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[Any, ...]:
        # Under activation checkpointing this recomputes them.
        x_TK, a_RK, down_TR = ctx.saved.saved_tensors
        of_a, of_b = ctx.dtypes[: len(ctx.dtypes) // 2], iter(ctx.dtypes[len(ctx.dtypes) // 2 :])
        dx_TK: torch.Tensor | None = None
        d_down_TR = torch.empty_like(down_TR)
        db_Nr: list[torch.Tensor | None] = []
        for (parts, weight), dy_TN in zip(ctx.layers, upstream, strict=True):
            if dy_TN is not None and ctx.needs_input_grad[0]:
                weight_NK = weight(dy_TN.dtype)
                dx_TK = dy_TN @ weight_NK if dx_TK is None else dx_TK.addmm_(dy_TN, weight_NK)
                del weight_NK  # of a quantized layer it is a copy in full
            for part, dtype in zip(parts, of_b, strict=False):
                h_Tr, dh_Tr = part.of_down(down_TR), part.of_down(d_down_TR)
                if dy_TN is None:
                    dh_Tr.zero_()
                    db_Nr.append(None)
                    continue
                part_TN = part.of_output(dy_TN)
                # With a beta of 0 what is in memory is not read.
                dh_Tr.addmm_(part_TN, part.b_Nr, beta=0, alpha=part.scale)
                db_Nr.append(_parameter_gradient(part_TN.mT, h_Tr, part.scale, dtype))
        if dx_TK is not None:
            dx_TK.addmm_(d_down_TR, a_RK)
        da_RK = _parameter_gradient(d_down_TR.mT, x_TK, 1.0, of_a[0])
        da_rK = da_RK.split([part.rank for parts, _ in ctx.layers for part in parts])
        return dx_TK, None, None, None, None, *da_rK, *db_Nr


def _describe(layers: Layers, factors: Factors) -> list[_Layer]:
    descriptions: list[_Layer] = []
    b_Nr, first_rank = iter(factors.b_Nr), 0
    for layer in layers:
        parts: list[_Part] = []
        for name, factor_Nr in zip(layer.lora_B, b_Nr, strict=False):
            width, rank = factor_Nr.shape
            first = layer.first_row(name)
            parts.append(_Part(first, width, first_rank, rank, layer.scale, factor_Nr))
            first_rank += rank
        weight = layer.weight
        again = weight.again() if isinstance(weight, QuantizedMatrix) else weight.detach().to
        descriptions.append(_Layer(parts, again))
    return descriptions


def _base_output(layer: "LoraLinear", x_TK: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    if isinstance(weight, QuantizedMatrix) or is_packed(weight):
        return affine(x_TK, weight, bias)
    return F.linear(x_TK, weight.to(x_TK.dtype), None if bias is None else bias.to(x_TK.dtype))


def _parameter_gradient(
    left: torch.Tensor, right: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """`scale * left @ right` in `dtype`."""
    # PyTorch multiplies 16-bit matrices into an fp32 result on GPUs only.
    is_direct = left.dtype.itemsize == 2 and dtype == torch.float32 and left.is_cuda
    shape = left.shape[0], right.shape[1]
    out = left.new_empty(shape, dtype=dtype if is_direct else left.dtype)
    return scaled_product_(out, left, right, scale).to(dtype)
