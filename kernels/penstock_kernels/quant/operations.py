"""The quantization operations and their backends."""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, INTERPRETED, KernelImpl, Op, needs_cuda
from penstock_kernels.quant import reference
from penstock_kernels.quant.formats import Format
from penstock_kernels.quant.quantized_tensor import QuantizedTensor

__all__ = ["dequantize", "matmul", "quantize"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _unsupported_quantize(
    weight_NK: torch.Tensor,
    format: Format,
    largest: torch.Tensor | None = None,
) -> str | None:
    del format, largest
    if weight_NK.dtype not in _FLOATS:
        return f"the weight is {weight_NK.dtype}"
    return needs_cuda(weight_NK)


def _unsupported_dequantize(
    quantized: QuantizedTensor, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    if dtype not in _FLOATS:
        return f"it gives no {dtype}"
    return needs_cuda(*quantized.tensors.values())


def _dequantized(x_TK: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
    """x W^T of the dequantized matrix."""
    return x_TK @ dequantize(quantized, x_TK.dtype).mT


_QUANTIZE: Mapping[str, KernelImpl[..., QuantizedTensor]] = {}
_DEQUANTIZE: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
_MATMUL: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.quant import triton_dequantize, triton_matmul, triton_quantize

    def _unsupported_matmul(x_TK: torch.Tensor, quantized: QuantizedTensor) -> str | None:
        most, group = triton_matmul.MOST_ROWS, quantized.format.group
        if x_TK.ndim != 2 or quantized.shape[1:] != x_TK.shape[1:]:
            return f"x is {tuple(x_TK.shape)}, and the matrix {quantized.shape}"
        if x_TK.shape[0] > most:
            return f"x has {x_TK.shape[0]} rows; from {most + 1} on dequantizing once is cheaper"
        if group is not None and group > triton_matmul.MOST_GROUP:
            return f"groups of {group} columns are wider than its tiles"
        if x_TK.dtype not in _FLOATS:
            return f"x is {x_TK.dtype}"
        if x_TK.dtype == torch.float32 and not INTERPRETED:
            # Without tensor cores its tiles would be spilled.
            return "x is in float32, and it takes bfloat16 and float16"
        return needs_cuda(x_TK, *quantized.tensors.values())

    _QUANTIZE = {"triton": KernelImpl(triton_quantize.quantize, _unsupported_quantize, "triton")}
    _DEQUANTIZE = {
        "triton": KernelImpl(triton_dequantize.dequantize, _unsupported_dequantize, "triton")
    }
    _MATMUL = {"triton": KernelImpl(triton_matmul.matmul, _unsupported_matmul, "triton")}

quantize: Op[..., QuantizedTensor] = Op("quantize", reference.quantize, _QUANTIZE)
dequantize: Op[..., torch.Tensor] = Op("dequantize", reference.dequantize, _DEQUANTIZE)

matmul: Op[[torch.Tensor, QuantizedTensor], torch.Tensor] = Op(
    "matmul of a quantized matrix", _dequantized, _MATMUL, reference_name="dequantized"
)
"""`x W^T`, [T, N], of x [T, K] and a matrix [N, K].

A product of few rows takes as long as the matrix takes to be read. `triton` reads the codes alone:
half a byte for each weight of 4 bits. `dequantized` reads them, writes the weights and reads those:
4.5 bytes; but its product is the vendor's, and from some rows on the product is what takes long.
Up to 64 rows, one tile, the first is taken.
"""
