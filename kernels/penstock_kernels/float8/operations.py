"""The FP8 operations and their backends."""

from collections.abc import Mapping

import torch

from penstock_kernels.float8 import reference, scaled_mm
from penstock_kernels.float8.float8_matrix import Float8Matrix
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op

__all__ = ["multiply", "quantize", "transpose"]

_QUANTIZE: Mapping[str, KernelImpl[..., Float8Matrix]] = {}
_TRANSPOSE: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
_MULTIPLY: Mapping[str, KernelImpl[..., torch.Tensor]] = {
    "scaled": KernelImpl(scaled_mm.multiply, scaled_mm.unsupported_reason),
}
if HAS_TRITON:
    from penstock_kernels.float8 import triton_multiply, triton_quantize

    _QUANTIZE = {
        "triton": KernelImpl(triton_quantize.quantize, triton_quantize.unsupported_reason, "triton")
    }
    _TRANSPOSE = {
        "triton": KernelImpl(
            triton_quantize.transpose, triton_quantize.transpose_unsupported_reason, "triton"
        )
    }
    _MULTIPLY = {
        **_MULTIPLY,
        "triton": KernelImpl(
            triton_multiply.multiply, triton_multiply.unsupported_reason, "triton"
        ),
    }

quantize: Op[..., Float8Matrix] = Op("float8 quantize", reference.quantize, _QUANTIZE)
multiply: Op[..., torch.Tensor] = Op("float8 multiply", reference.multiply, _MULTIPLY)
transpose: Op[..., torch.Tensor] = Op("float8 transpose", reference.transpose, _TRANSPOSE)
