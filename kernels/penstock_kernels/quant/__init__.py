"""Quantized matrices: formats, operations, and frozen layers.

T rows of x, matrices of N rows and K columns, a stack of them with leading dimensions.
"""

from penstock_kernels.quant.formats import FORMATS, Format, get_format
from penstock_kernels.quant.linear import group_linear, linear
from penstock_kernels.quant.operations import dequantize, matmul, quantize
from penstock_kernels.quant.quantized_tensor import QuantizedTensor, cat, step_size
from penstock_kernels.quant.scales import largest

__all__ = [
    "FORMATS",
    "Format",
    "QuantizedTensor",
    "cat",
    "dequantize",
    "get_format",
    "group_linear",
    "largest",
    "linear",
    "matmul",
    "quantize",
    "step_size",
]
