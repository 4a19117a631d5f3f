"""The operations and what makes them fast: the choice, as every operation states it."""

from collections.abc import Mapping

import torch

from penstock_kernels.float8 import reference, scaled_mm
from penstock_kernels.float8.float8_matrix import Coded
from penstock_kernels.op import HAS_TRITON, Fast, Op

__all__ = ["multiply", "quantise"]

_QUANTISE: Mapping[str, Fast[..., Coded]] = {}
_MULTIPLY: Mapping[str, Fast[..., torch.Tensor]] = {
    "scaled": Fast(scaled_mm.multiply, scaled_mm.refuses),
}
if HAS_TRITON:
    from penstock_kernels.float8 import triton_multiply, triton_quantize

    _QUANTISE = {"triton": Fast(triton_quantize.quantise, triton_quantize.refuses, "triton")}
    _MULTIPLY = {
        **_MULTIPLY,
        "triton": Fast(triton_multiply.multiply, triton_multiply.refuses, "triton"),
    }

quantise: Op[..., Coded] = Op("float8 quantise", reference.quantise, _QUANTISE)
multiply: Op[..., torch.Tensor] = Op("float8 multiply", reference.multiply, _MULTIPLY)
