"""Frozen quantized weights of linear layers and experts.

N rows, K columns; E experts; T or R rows of x.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from penstock.models.layers import quantized_ops
from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.quantized_ops import DequantizableModule, Multiply, Tensors
from penstock_kernels.quant import Format, QuantizedTensor, dequantize, group_linear, linear

COMPONENTS = ("codes", "scales", "global_scales")
"""Names of the tensors of a quantized matrix."""

WeightTransform = Callable[[QuantizedTensor], Callable[[torch.Tensor], torch.Tensor] | None]
"""Called with the quantized matrix in the forward pass. It returns None or a function from the
dequantized weight to the weight that is used; the backward pass calls that function again."""


class QuantizedMatrix(DequantizableModule):
    """A quantized matrix [N, K], or those of experts [E, N, K], as uint8 parameters.

    They are uint8 so that casting a model does not change the scales. N is their last dimension but
    one, so they are sharded by rows or experts like any other parameter. A caller that shards
    columns must set `columns` as well. `transform` is a hook that modifies the weights in training.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    global_scales: nn.Parameter

    def __init__(self, format: Format, shape: Sequence[int], device: torch.device) -> None:
        super().__init__()
        *rows, self.columns = shape
        self.format = format
        self.transform: WeightTransform | None = None
        for name, width in format.widths(self.columns).items():
            raw = torch.empty(*rows, width, dtype=torch.uint8, device=device)
            self.register_parameter(name, nn.Parameter(raw, requires_grad=False))

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantized matrix or matrices."""
        return torch.Size((*self.codes.shape[:-1], self.columns))

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self.codes.device

    @property
    def value(self) -> QuantizedTensor:
        """The quantized tensors, as views of the parameters."""
        return QuantizedTensor.of_bytes(self.format, self.columns, dict(self.named_parameters()))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T`, in the autocast dtype if autocast is enabled, otherwise in x's dtype."""
        x = as_autocast(x)
        number = self.traced_op_id()
        if number is not None:
            y_TN = quantized_ops.linear(x.flatten(0, -2), number, self._tensors, self.columns)
            return y_TN.unflatten(0, x.shape[:-1])
        value = self.value
        return linear(x, value, self._weight_transform(value))

    def group_linear(
        self, x_RK: torch.Tensor, counts_E: torch.Tensor, multiply: Multiply
    ) -> torch.Tensor:
        """Grouped GEMM, [R, N]. Rows are sorted by expert; `counts_E` is the number of rows of
        each."""
        number = self.traced_op_id()
        if number is not None:
            tensors, columns = self._tensors, self.columns
            return quantized_ops.group_linear(x_RK, counts_E, number, tensors, columns, multiply)
        value = self.value
        return group_linear(x_RK, value, counts_E, multiply, self._weight_transform(value))

    def weight(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The weight of the current pass, dequantized from these tensors into new memory."""
        named = {
            name: tensor
            for name, tensor in zip(COMPONENTS, tensors, strict=True)
            if tensor is not None
        }
        value = QuantizedTensor.of_bytes(self.format, self.columns, named)
        transform, weight = self._weight_transform(value), dequantize(value, dtype)
        return weight if transform is None else transform(weight)

    @property
    def _tensors(self) -> Tensors:
        has_global = self.format.scales == "e4m3"
        return self.codes, self.scales, self.global_scales if has_global else None

    def _weight_transform(
        self, value: QuantizedTensor
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return self.transform(value) if self.transform and self.training else None

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.format.name}, {list(self.shape)}"


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized weight."""

    def __init__(self, base: nn.Linear, format: Format) -> None:
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.bias = base.bias
        set_weight(self, QuantizedMatrix(format, base.weight.shape, base.weight.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The base layer's output, with the quantized weight."""
        return affine(input, self.weight, self.bias)


def set_weight(layer: nn.Linear, weight: nn.Parameter | QuantizedMatrix) -> None:
    """Set the layer's weight. A QuantizedMatrix has the attributes of a parameter that other code
    uses: shape and device."""
    # nn.Module refuses to assign a module to the name of a parameter.
    del layer.weight
    layer.weight = cast(nn.Parameter, weight)


def get_weight(layer: nn.Linear) -> nn.Parameter | QuantizedMatrix:
    """The layer's weight: a parameter, or the matrix that `set_weight` set."""
    return cast(nn.Parameter | QuantizedMatrix, layer.weight)


def affine(
    x: torch.Tensor, weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x W^T + b`, with a quantized or ordinary weight."""
    if not isinstance(weight, QuantizedMatrix):
        return nn.functional.linear(x, weight, bias)
    y = weight.linear(x)
    return y if bias is None else y + bias.to(y.dtype)


def dequantize_rows(weight: torch.Tensor | QuantizedMatrix, start: int, end: int) -> torch.Tensor:
    """Rows of a weight; fp32 if it is quantized."""
    if not isinstance(weight, QuantizedMatrix):
        return weight[start:end]
    return dequantize(weight.value.narrow(-2, start, end - start), torch.float32)


def keep_quantized(model: nn.Module, name: str, format: Format) -> None:
    """Replace the parameter `name` of a model by an uninitialized matrix of the format. A stack of
    experts' matrices [E, K, N] becomes [E, N, K]."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.Linear):
        model.set_submodule(owner, QuantizedLinear(module, format))
        return
    weight = module.get_parameter(leaf)
    is_transposed = bool(getattr(module, "is_transposed", False))
    shape = weight.mT.shape if is_transposed else weight.shape
    delattr(module, leaf)
    setattr(module, leaf, QuantizedMatrix(format, shape, weight.device))
