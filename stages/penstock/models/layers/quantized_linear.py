"""Matrices that are kept in fewer bits and do not learn, where a layer's weight would be.

N rows, K columns; E experts; T or R rows of x.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from penstock.models.layers import quantized_ops as programs
from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.quantized_ops import Dequantizes, Multiply, Tensors
from penstock_kernels.quant import Format, Quantised, dequantise, group_linear, linear

LEAVES = ("codes", "scales", "global_scales")
"""What the tensors of a quantised matrix are called."""

Change = Callable[[Quantised], Callable[[torch.Tensor], torch.Tensor] | None]
"""A pass's matrix to what makes of its dequantised weight the one that is used; called in forward,
and what it gives once more in backward."""


class QuantisedMatrix(Dequantizes):
    """A matrix [N, K], or those of experts [E, N, K], as parameters of bytes.

    Bytes, so that nobody casts scales to another precision; and with N as the last dimension but
    one of each, so that whoever cuts rows or experts cuts these as any other parameter. Whoever
    cuts columns sets `columns` as well. `change` is a socket for what is done to weights in
    training.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    global_scales: nn.Parameter

    def __init__(self, format: Format, shape: Sequence[int], device: torch.device) -> None:
        super().__init__()
        *rows, self.columns = shape
        self.format = format
        self.change: Change | None = None
        for name, width in format.widths(self.columns).items():
            raw = torch.empty(*rows, width, dtype=torch.uint8, device=device)
            self.register_parameter(name, nn.Parameter(raw, requires_grad=False))

    @property
    def shape(self) -> torch.Size:
        """That of the matrix, or of the matrices."""
        return torch.Size((*self.codes.shape[:-1], self.columns))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def value(self) -> Quantised:
        """Its tensors, as views."""
        return Quantised.of_bytes(self.format, self.columns, dict(self.named_parameters()))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T`, in x's dtype, or autocast's where that is on."""
        x = as_autocast(x)
        number = self.known_number()
        if number is not None:
            y_TN = programs.linear(x.flatten(0, -2), number, self._tensors, self.columns)
            return y_TN.unflatten(0, x.shape[:-1])
        value = self.value
        return linear(x, value, self._change_of(value))

    def group_linear(
        self, x_RK: torch.Tensor, counts_E: torch.Tensor, multiply: Multiply
    ) -> torch.Tensor:
        """Rows by their experts' matrices, [R, N]; `counts_E` of each lie in order."""
        number = self.known_number()
        if number is not None:
            tensors, columns = self._tensors, self.columns
            return programs.group_linear(x_RK, counts_E, number, tensors, columns, multiply)
        value = self.value
        return group_linear(x_RK, value, counts_E, multiply, self._change_of(value))

    def weight(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The weight that a pass uses, of these tensors, in new memory."""
        named = {name: one for name, one in zip(LEAVES, tensors, strict=True) if one is not None}
        value = Quantised.of_bytes(self.format, self.columns, named)
        change, weight = self._change_of(value), dequantise(value, dtype)
        return weight if change is None else change(weight)

    @property
    def _tensors(self) -> Tensors:
        has_global = self.format.scales == "e4m3"
        return self.codes, self.scales, self.global_scales if has_global else None

    def _change_of(self, value: Quantised) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return self.change(value) if self.change and self.training else None

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.format.name}, {list(self.shape)}"


class QuantisedLinear(nn.Linear):
    """A frozen linear layer whose matrix is quantised."""

    def __init__(self, base: nn.Linear, format: Format) -> None:
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.bias = base.bias
        put_weight(self, QuantisedMatrix(format, base.weight.shape, base.weight.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the layer that it was made of."""
        return affine(input, self.weight, self.bias)


def put_weight(layer: nn.Linear, weight: nn.Parameter | QuantisedMatrix) -> None:
    """Make it the layer's weight. A matrix has all that others ask of one: a shape, a device."""
    del layer.weight
    layer.weight = cast(nn.Parameter, weight)


def get_weight(layer: nn.Linear) -> nn.Parameter | QuantisedMatrix:
    """What `put_weight` put there, or the layer's own."""
    return cast(nn.Parameter | QuantisedMatrix, layer.weight)


def affine(
    x: torch.Tensor, weight: torch.Tensor | QuantisedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x W^T + b`, whichever way the matrix is kept."""
    if not isinstance(weight, QuantisedMatrix):
        return nn.functional.linear(x, weight, bias)
    y = weight.linear(x)
    return y if bias is None else y + bias.to(y.dtype)


def dequantize_rows(weight: torch.Tensor | QuantisedMatrix, start: int, end: int) -> torch.Tensor:
    """Rows of a matrix, fp32 where they are quantised."""
    if not isinstance(weight, QuantisedMatrix):
        return weight[start:end]
    return dequantise(weight.value.narrow(-2, start, end - start), torch.float32)


def keep_quantised(model: nn.Module, name: str, format: Format) -> None:
    """Put a matrix of the format, unfilled, in the place of the parameter `name` of a model."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.Linear):
        model.set_submodule(owner, QuantisedLinear(module, format))
        return
    weight = module.get_parameter(leaf)
    delattr(module, leaf)
    setattr(module, leaf, QuantisedMatrix(format, weight.shape, weight.device))
