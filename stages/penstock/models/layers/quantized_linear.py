"""Frozen quantized weights of linear layers and experts.

N rows, K columns; E experts; T or R rows of x.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.dropout import DropoutRNG, current_dropout_rng, dropout_rng
from penstock.models.layers.module_registry import OpModule, module_by_id
from penstock_kernels.custom_op import operator
from penstock_kernels.packed_linear import packed_linear
from penstock_kernels.quant import Format, QuantizedTensor, dequantize, group_linear, linear

COMPONENTS = ("codes", "scales", "global_scales")
"""Names of the tensors of a quantized matrix."""

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scales and global scales, as uint8."""

WeightTransform = Callable[[QuantizedTensor], Callable[[torch.Tensor], torch.Tensor] | None]
"""Called with the quantized matrix in the forward pass. It returns None or a function from the
dequantized weight to the weight that is used; the backward pass calls that function again."""


class QuantizedMatrix(OpModule):
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
            # No buffer: FSDP2 shards parameters alone, and would leave a full copy on every rank.
            self.register_parameter(name, nn.Parameter(raw, requires_grad=False))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.columns))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def value(self) -> QuantizedTensor:
        return QuantizedTensor.of_bytes(self.format, self.columns, dict(self.named_parameters()))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T`, in the autocast dtype if autocast is enabled, otherwise in x's dtype."""
        x = as_autocast(x)
        number = self.traced_op_id()
        if number is not None:
            args = number, *self._tensors, self.columns, None
            return _QuantizedMatmul.apply(x.flatten(0, -2), None, *args).unflatten(0, x.shape[:-1])
        value = self.value
        return linear(x, value, self._weight_transform(value))

    def group_linear(
        self, x_RK: torch.Tensor, counts_E: torch.Tensor, multiply: Multiply
    ) -> torch.Tensor:
        """Grouped GEMM, [R, N]. Rows are sorted by expert; `counts_E` is the number of rows of
        each."""
        number = self.traced_op_id()
        if number is not None:
            args = number, *self._tensors, self.columns, multiply
            return _QuantizedMatmul.apply(x_RK, counts_E, *args)
        value = self.value
        return group_linear(x_RK, value, counts_E, multiply, self._weight_transform(value))

    def weight(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        # The weight of the current pass, dequantized from these tensors into new memory.
        named = {
            name: tensor
            for name, tensor in zip(COMPONENTS, tensors, strict=True)
            if tensor is not None
        }
        value = QuantizedTensor.of_bytes(self.format, self.columns, named)
        transform, weight = self._weight_transform(value), dequantize(value, dtype)
        return weight if transform is None else transform(weight)

    def again(self) -> Callable[[torch.dtype], torch.Tensor]:
        """A function that dequantizes the weight of the current pass into a dtype, for a later
        backward pass."""
        value = self.value
        transform = self._weight_transform(value)

        def weight(dtype: torch.dtype) -> torch.Tensor:
            dequantized = dequantize(value, dtype)
            return dequantized if transform is None else transform(dequantized)

        return weight

    @property
    def _tensors(self) -> Tensors:
        has_global = self.format.scales == "e4m3"
        return self.codes, self.scales, self.global_scales if has_global else None

    def _weight_transform(
        self, value: QuantizedTensor
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return self.transform(value) if self.transform and self.training else None

    def extra_repr(self) -> str:
        return f"{self.format.name}, {list(self.shape)}"


# The forward and the backward pass dequantize with different operators. With one operator the
# compiler would recognize both results as equal and keep the dequantized weight in memory between
# the passes. Quantization noise is the same in both: the first operator returns the seed and the
# step of its RNG, and the second one gets them.


class _QuantizedMatmul(torch.autograd.Function):
    """`x W^T` in compiled code, or a grouped GEMM with `multiply`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        counts_E: torch.Tensor | None,
        op_id: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scales: torch.Tensor | None,
        columns: int,
        multiply: Multiply | None,
    ) -> torch.Tensor:
        weight, rng_state = _weight_op(op_id, codes, scales, global_scales, columns, x_TK.dtype)
        ctx.save_for_backward(counts_E, op_id, rng_state, codes, scales, global_scales)
        ctx.columns, ctx.multiply = columns, multiply
        if multiply is None or counts_E is None:
            return x_TK @ weight.mT
        return multiply(x_TK, weight, counts_E)

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
        counts_E, *saved = ctx.saved_tensors
        weight, nothing = _recompute_weight_op(*saved, ctx.columns, dy_TN.dtype), (None,) * 7
        if ctx.multiply is None:
            return dy_TN @ weight, *nothing
        return ctx.multiply(dy_TN, weight.mT, counts_E), *nothing


def _dequantize(
    op_id: torch.Tensor, tensors: Tensors, dtype: torch.dtype, rng: DropoutRNG | None
) -> torch.Tensor:
    matrix = module_by_id(op_id)
    assert isinstance(matrix, QuantizedMatrix)
    with dropout_rng(rng):
        return matrix.weight(tensors, dtype)


def _weight(
    op_id: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    # The weight, and its RNG as int64 [has_rng, seed, step] on the CPU.
    del columns
    rng = current_dropout_rng()
    rng_state = [0, 0, 0] if rng is None else [1, rng.seed, rng.step]
    weight = _dequantize(op_id, (codes, scales, global_scales), dtype, rng)
    # On the CPU: the backward pass reads it, and would wait for a GPU.
    return weight, torch.tensor(rng_state, device="cpu")


def _weight_fake(
    op_id: torch.Tensor, codes: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, columns, dtype = args
    weight = codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)
    return weight, op_id.new_empty(3)


_weight_op = operator("quantized_weight", _weight, fake=_weight_fake)


def _recompute_weight(
    op_id: torch.Tensor,
    rng_state: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scales: torch.Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    del columns
    has_rng, seed, step = rng_state.tolist()
    # Noise has no tokens: its key follows from seed and step.
    rng = DropoutRNG(seed, step, rng_state[:0]) if has_rng else None
    return _dequantize(op_id, (codes, scales, global_scales), dtype, rng)


_recompute_weight_op = operator(
    "quantized_weight_again",
    _recompute_weight,
    fake=lambda op_id, _state, *args: _weight_fake(op_id, *args)[0],
)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized weight."""

    def __init__(self, base: nn.Linear, format: Format) -> None:
        # On the meta device: no memory for a full-width weight, which `set_weight` replaces.
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.bias = base.bias
        set_weight(self, QuantizedMatrix(format, base.weight.shape, base.weight.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
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
        return packed_linear(x, weight, bias)
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
