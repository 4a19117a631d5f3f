"""The FP8 matmuls of a linear layer and of its gradients.

T rows of x, K columns in, N out. Three matmuls: y of x and W, contracted over K; the gradient of x
of dy and W, over N; that of W of dy and x, over T. Scales are shared along the contracted
dimension, or a part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from penstock_kernels.float8.float8_matrix import (
    Float8Matrix,
    Kind,
    Sharing,
    amax,
    compute_scales,
)
from penstock_kernels.float8.hadamard import factors, turn
from penstock_kernels.float8.operations import multiply, quantize, transpose
from penstock_kernels.float8.weight import Float8WeightShard

Recipe = Literal["tensorwise", "rowwise", "blockwise"]
Product = Literal["quantized", "exact"]
Agree = Callable[[torch.Tensor], torch.Tensor]
"""All-reduces maxima over the ranks that hold shards of the same matrix."""

SHARING: dict[Recipe, tuple[Sharing, Sharing]] = {
    "tensorwise": ("tensor", "tensor"),
    "rowwise": ("rows", "rows"),
    "blockwise": ("groups", "tiles"),
}
"""Of activations and gradients, and of weights."""


@dataclass(frozen=True)
class Float8Recipe:
    """How a layer's tensors are quantized."""

    recipe: Recipe = "rowwise"
    gradients: Kind = "e5m2"
    """Of outputs; activations and weights are e4m3."""
    input_gradient: Product = "quantized"
    """`exact`: from the unquantized gradient of y and the dequantized W."""
    weight_gradient: Product = "quantized"
    """`exact`: from the unquantized gradient of y and the unquantized x."""
    block: int | None = None
    """Block size of the Hadamard transform (`hadamard.py`) of x and W; None: no transform."""

    @property
    def of_rows(self) -> Sharing:
        """Sharing of scales in x and in gradients."""
        return SHARING[self.recipe][0]

    @property
    def of_weights(self) -> Sharing:
        return SHARING[self.recipe][1]


@dataclass(frozen=True)
class AmaxReduceGroups:
    """Process groups over which maxima are reduced, for each dimension of the layer's matrices."""

    tokens: Agree | None = None
    inputs: Agree | None = None
    outputs: Agree | None = None


ALONE = AmaxReduceGroups()


def coded(
    x_RC: torch.Tensor, kind: Kind, sharing: Sharing, rows: Agree | None, columns: Agree | None
) -> Float8Matrix:
    """Quantize a shard with the scales of the full matrix.

    Groups and tiles never span shards.
    """
    # Scales of rows reach over shards of columns, and one of a tensor over both.
    reaches = {"tensor": (rows, columns), "rows": (columns,)}.get(sharing, ())
    sharers = [agree for agree in reaches if agree]
    if not sharers:
        return quantize(x_RC, kind, sharing)
    largest = amax(x_RC, sharing)
    for agree in sharers:
        largest = agree(largest)
    return quantize(x_RC, kind, sharing, compute_scales(largest, kind))


def seen(weight_NK: torch.Tensor, block: int | None) -> torch.Tensor:
    """The weight before quantization (Hadamard-transformed if enabled); and the inverse for its
    gradient.
    """
    return weight_NK if block is None else turn(weight_NK, block, factors(block)[1])


def turned(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """Rows before quantization (Hadamard-transformed if enabled); and the inverse for their
    gradient.
    """
    return x if block is None else turn(x, block, factors(block)[0])


def transposed(matrix: Float8Matrix) -> Float8Matrix:
    """The quantized transpose, where scales are shared along columns as along rows."""
    assert matrix.sharing in ("tensor", "tiles"), matrix.sharing
    # A stored transpose: torch's scaled matmuls (2.13) take the first matrix by rows and the second
    # by columns alone.
    return Float8Matrix(transpose(matrix.codes), matrix.scales.mT.contiguous(), matrix.sharing)


def outputs(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, scheme: Float8Recipe, agreement: AmaxReduceGroups
) -> tuple[torch.Tensor, Float8Matrix, Float8Matrix]:
    """y [T, N] in x's dtype, and its quantized operands."""
    x = coded(
        turned(x_TK, scheme.block), "e4m3", scheme.of_rows, agreement.tokens, agreement.inputs
    )
    # All-gathered in FP8: it has been coded by its shards.
    if isinstance(weight_NK, Float8WeightShard):
        weight = weight_NK.coded
    else:
        full = seen(weight_NK.to(x_TK.dtype), scheme.block)
        weight = coded(full, "e4m3", scheme.of_weights, agreement.outputs, agreement.inputs)
    # As torchao's tensorwise recipe: sums of outputs are fast, those of gradients exact.
    return multiply(x, weight, x_TK.dtype, "fast"), x, weight


def gradients(
    dy_TN: torch.Tensor,
    x: torch.Tensor | Float8Matrix | None,
    weight_NK: torch.Tensor,
    weight_scales: torch.Tensor,
    scheme: Float8Recipe,
    agreement: AmaxReduceGroups,
    *,
    needs_grad: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x [T, K] and of W [N, K], or of one of them.

    `x`: unquantized, or its codes where they share one scale and W's gradient uses FP8;
    None if W's gradient is not needed. `weight_scales`: of the forward pass.
    """
    dx = dweight = dy = None
    rounds = (scheme.input_gradient == "quantized", scheme.weight_gradient == "quantized")
    if scheme.of_rows == "tensor" and any(map(all, zip(needs_grad, rounds, strict=True))):
        # Used for both gradients.
        dy = coded(dy_TN, scheme.gradients, "tensor", agreement.tokens, agreement.outputs)
    if needs_grad[0]:
        dx = _input_gradient(dy_TN, dy, weight_NK, weight_scales, scheme, agreement)
    if needs_grad[1]:
        assert x is not None
        dweight = _weight_gradient(dy_TN, dy, x, scheme, agreement).to(weight_NK.dtype)
    return dx, dweight


def _input_gradient(
    dy_TN: torch.Tensor,
    dy: Float8Matrix | None,
    weight_NK: torch.Tensor,
    scales: torch.Tensor,
    scheme: Float8Recipe,
    agreement: AmaxReduceGroups,
) -> torch.Tensor:
    dtype, sharing = dy_TN.dtype, scheme.of_weights
    full = None
    if not isinstance(weight_NK, Float8WeightShard):
        full = seen(weight_NK.to(dtype), scheme.block)
    is_quantized = scheme.input_gradient == "quantized"
    if is_quantized and sharing == "rows":
        # An all-gathered FP8 weight is scaled along its other dimension: it would be rounded twice.
        assert full is not None, "rows of a gathered weight have no scales for their columns"
        across = coded(full.mT, "e4m3", sharing, agreement.inputs, agreement.outputs)
    else:
        weight = (
            weight_NK.coded
            if isinstance(weight_NK, Float8WeightShard)
            else quantize(full, "e4m3", sharing, scales)
        )
        if not is_quantized:
            return turned(dy_TN @ weight.numbers(dtype), scheme.block)
        across = transposed(weight)
    # Scales of rows and groups run along N here, and along T in W's gradient: dy is coded for each.
    dy = dy or coded(dy_TN, scheme.gradients, scheme.of_rows, agreement.tokens, agreement.outputs)
    return turned(multiply(dy, across, dtype), scheme.block)


def _weight_gradient(
    dy_TN: torch.Tensor,
    dy: Float8Matrix | None,
    x: torch.Tensor | Float8Matrix,
    scheme: Float8Recipe,
    agreement: AmaxReduceGroups,
) -> torch.Tensor:
    if scheme.weight_gradient == "exact":
        assert isinstance(x, torch.Tensor)
        return dy_TN.mT @ x
    if dy is not None:
        if isinstance(x, torch.Tensor):
            full = turned(x, scheme.block)
            x = coded(full, "e4m3", "tensor", agreement.tokens, agreement.inputs)
        return seen(multiply(transposed(dy), transposed(x), dy_TN.dtype), scheme.block)
    assert isinstance(x, torch.Tensor)
    # Tokens are contracted here, so scales are shared along them.
    tokens, sharing = agreement.tokens, scheme.of_rows
    down = coded(dy_TN.mT, scheme.gradients, sharing, agreement.outputs, tokens)
    along = coded(turned(x, scheme.block).mT, "e4m3", sharing, agreement.inputs, tokens)
    return seen(multiply(down, along, dy_TN.dtype), scheme.block)
