"""Definition of FP8 quantization and matmuls; slow.

R rows, C columns; M and N rows of two matrices, K columns (the contracted dimension).
"""

import torch

from penstock_kernels.float8.float8_matrix import (
    DTYPES,
    MOST,
    Float8Matrix,
    Kind,
    Sharing,
    Sums,
    amax,
    compute_scales,
    spread,
)


def quantize(
    x_RC: torch.Tensor, kind: Kind, sharing: Sharing, scales: torch.Tensor | None = None
) -> Float8Matrix:
    """Quantize a matrix to FP8; it may be a transposed view.

    `scales`: its scales, if they are known.
    """
    if scales is None:
        scales = compute_scales(amax(x_RC, sharing), kind)
    scaled = x_RC.float() / spread(scales, sharing, *x_RC.shape)
    # The nearest values, ties to even; larger ones saturate.
    codes = scaled.clamp(-MOST[kind], MOST[kind]).to(DTYPES[kind])
    return Float8Matrix(codes.contiguous(), scales, sharing)


def multiply(
    a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype, sums: Sums = "exact"
) -> torch.Tensor:
    """`a b^T`, [M, N] in float32 or bfloat16, accumulated in float32 and rounded once."""
    del sums
    return a_MK.numbers(dtype) @ b_NK.numbers(dtype).mT


def transpose(codes_RC: torch.Tensor) -> torch.Tensor:
    """Codes [C, R], rows one after another."""
    return codes_RC.mT.contiguous()
