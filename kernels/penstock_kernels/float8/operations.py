"""The FP8 operations and their backends."""

import torch

from penstock_kernels.float8 import reference, scaled_mm
from penstock_kernels.float8.float8_matrix import (
    BLOCK,
    Float8Matrix,
    Kind,
    Sharing,
    Sums,
    has_float8,
    shape_of_scales,
)
from penstock_kernels.op import (
    INTERPRETED,
    KernelImpl,
    Op,
    needs_cuda,
    needs_floats,
    triton_backend,
)

__all__ = ["multiply", "quantize", "transpose"]


def _unsupported_quantize(
    x_RC: torch.Tensor, kind: Kind, sharing: Sharing, scales: torch.Tensor | None = None
) -> str | None:
    del kind
    if x_RC.dim() != 2:
        return f"it rounds matrices, and this is {tuple(x_RC.shape)}"
    expected = shape_of_scales(sharing, *x_RC.shape)
    if scales is not None and tuple(scales.shape) != expected:
        return f"scales of {sharing} are {expected}, and these are {tuple(scales.shape)}"
    return needs_floats(x_RC) or needs_cuda(x_RC)


def _unsupported_transpose(codes_RC: torch.Tensor) -> str | None:
    if codes_RC.dim() != 2 or codes_RC.dtype.itemsize != 1 or not codes_RC.is_contiguous():
        return "it transposes matrices of bytes that lie row by row"
    return needs_cuda(codes_RC)


def _unsupported_multiply(
    a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype, sums: Sums = "exact"
) -> str | None:
    del sums
    if a_MK.codes.shape[1] != b_NK.codes.shape[1]:
        return f"the matrices are {tuple(a_MK.codes.shape)} and {tuple(b_NK.codes.shape)}"
    for matrix in (a_MK, b_NK):
        if matrix.sharing not in ("groups", "tiles"):
            return f"scales of {matrix.sharing} reach beyond {BLOCK} columns"
        if not matrix.codes.is_contiguous():
            return "codes do not lie row by row"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it gives no {dtype}"
    if misplaced := needs_cuda(a_MK.codes, b_NK.codes):
        return misplaced
    # Codes are multiplied as FP8; the interpreter decodes them.
    if not (INTERPRETED or has_float8(a_MK.codes.device)):
        return "its tensor cores multiply no float8, which begins with sm_89"
    return None


quantize: Op[..., Float8Matrix] = Op(
    "float8 quantize",
    reference.quantize,
    triton_backend("float8.triton_quantize:quantize", _unsupported_quantize),
)
multiply: Op[..., torch.Tensor] = Op(
    "float8 multiply",
    reference.multiply,
    {
        "scaled": KernelImpl(scaled_mm.multiply, scaled_mm.unsupported_reason),
        **triton_backend("float8.triton_multiply:multiply", _unsupported_multiply),
    },
)
transpose: Op[..., torch.Tensor] = Op(
    "float8 transpose",
    reference.transpose,
    triton_backend("float8.triton_quantize:transpose", _unsupported_transpose),
)
