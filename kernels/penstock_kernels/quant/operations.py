"""The quantization operations and their backends."""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda
from penstock_kernels.quant import reference
from penstock_kernels.quant.formats import Format
from penstock_kernels.quant.quantized_matrix import Quantised

__all__ = ["dequantise", "matmul", "quantise"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _refuses_quantise(
    weight_NK: torch.Tensor,
    format: Format,
    largest: torch.Tensor | None = None,
) -> str | None:
    del format, largest
    if weight_NK.dtype not in _FLOATS:
        return f"the weight is {weight_NK.dtype}"
    return needs_cuda(weight_NK)


def _refuses_dequantise(quantised: Quantised, dtype: torch.dtype = torch.bfloat16) -> str | None:
    if dtype not in _FLOATS:
        return f"it gives no {dtype}"
    return needs_cuda(*quantised.tensors.values())


def _dequantised(x_TK: torch.Tensor, quantised: Quantised) -> torch.Tensor:
    """x W^T of the dequantized matrix."""
    return x_TK @ dequantise(quantised, x_TK.dtype).mT


_QUANTISE: Mapping[str, KernelImpl[..., Quantised]] = {}
_DEQUANTISE: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
_MATMUL: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.quant import triton_dequantize, triton_matmul, triton_quantize

    def _refuses_matmul(x_TK: torch.Tensor, quantised: Quantised) -> str | None:
        most, group = triton_matmul.MOST_ROWS, quantised.format.group
        if x_TK.ndim != 2 or quantised.shape[1:] != x_TK.shape[1:]:
            return f"x is {tuple(x_TK.shape)}, and the matrix {quantised.shape}"
        if x_TK.shape[0] > most:
            return f"x has {x_TK.shape[0]} rows; from {most + 1} on dequantising once is cheaper"
        if group is not None and group > triton_matmul.MOST_GROUP:
            return f"groups of {group} columns are wider than its tiles"
        if x_TK.dtype not in _FLOATS:
            return f"x is {x_TK.dtype}"
        return needs_cuda(x_TK, *quantised.tensors.values())

    _QUANTISE = {"triton": KernelImpl(triton_quantize.quantise, _refuses_quantise, "triton")}
    _DEQUANTISE = {
        "triton": KernelImpl(triton_dequantize.dequantise, _refuses_dequantise, "triton")
    }
    _MATMUL = {"triton": KernelImpl(triton_matmul.matmul, _refuses_matmul, "triton")}

quantise: Op[..., Quantised] = Op("quantise", reference.quantise, _QUANTISE)
dequantise: Op[..., torch.Tensor] = Op("dequantise", reference.dequantise, _DEQUANTISE)

matmul: Op[[torch.Tensor, Quantised], torch.Tensor] = Op(
    "matmul of a quantised matrix", _dequantised, _MATMUL, reference_name="dequantised"
)
"""`x W^T`, [T, N], of x [T, K] and a matrix [N, K].

A product of few rows takes as long as the matrix takes to be read. `triton` reads the codes alone:
half a byte for each weight of 4 bits. `dequantised` reads them, writes the weights and reads those:
4.5 bytes; but its product is the vendor's, and from some rows on the product is what takes long.
Up to 64 rows, one tile, the first is taken.
"""
