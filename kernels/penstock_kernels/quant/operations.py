"""The quantization operations and their backends."""

from typing import Any

import torch

from penstock_kernels.op import Op, needs_cuda, triton_backend
from penstock_kernels.quant import reference
from penstock_kernels.quant.quantized_tensor import QuantizedTensor

__all__ = ["dequantize", "matmul", "quantize"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _unsupported_quantize(weight_NK: torch.Tensor, *_: Any, **__: Any) -> str | None:
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
    return x_TK @ dequantize(quantized, x_TK.dtype).mT


quantize: Op[..., QuantizedTensor] = Op(
    "quantize",
    reference.quantize,
    triton_backend("quant.triton_quantize:quantize", _unsupported_quantize),
)
dequantize: Op[..., torch.Tensor] = Op(
    "dequantize",
    reference.dequantize,
    triton_backend("quant.triton_dequantize:dequantize", _unsupported_dequantize),
)

matmul: Op[[torch.Tensor, QuantizedTensor], torch.Tensor] = Op(
    "matmul of a quantized matrix",
    _dequantized,
    triton_backend("quant.triton_matmul:matmul", "unsupported_reason"),
    reference_name="dequantized",
)
"""`x W^T`, [T, N], of x [T, K] and a matrix [N, K].

A product of few rows takes as long as the matrix takes to be read. `triton` reads the codes alone:
half a byte for each weight of 4 bits. `dequantized` reads them, writes the weights and reads those:
4.5 bytes; but its product is the vendor's, and from some rows on the product is what takes long.
Up to 64 rows, one tile, the first is taken.
"""
