"""FP8 quantization on Triton: one pass over the matrix, in either memory layout, and one
before it where scales span more than a block. And the transposition of codes.

R rows, C columns.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import operator
from penstock_kernels.float8.float8_matrix import (
    BLOCK,
    DTYPES,
    Float8Matrix,
    Kind,
    Sharing,
    amax,
    compute_scales,
    has_float8,
    shape_of_scales,
)
from penstock_kernels.launch_sizes import cdiv
from penstock_kernels.quant.triton_numbers import E4M3_MOST, magnitude, to_e4m3, to_e5m2

E5M2_MOST = tl.constexpr(57344.0)

TRANSPOSED = 128
"""Rows and columns of a tile."""

ROWS = 32
"""Of a block of one group each; tiles have as many as columns."""


@triton.jit
def _scale_of(largest, EXPONENT: tl.constexpr):
    """The smallest power of two that brings a magnitude into range; see `compute_scales`."""
    bits = largest.to(tl.int32, bitcast=True)
    # The largest numbers, 448 and 57344, are 1.75 times a power of two: 0x600000 is that mantissa.
    exponent = (bits >> 23) - EXPONENT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    # An exponent field of 0 would make a scale of 0.
    scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    # Infinity and NaN have the largest exponent, and magnitudes have no sign bit.
    return tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def _quantize(
    x_ptr,
    codes_ptr,
    scales_ptr,
    largest_ptr,
    R,
    C,
    row_stride,
    column_stride,
    SHARING: tl.constexpr,
    KIND: tl.constexpr,
    GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """GIVEN: whether `scales_ptr` holds the scales; else they are stored there, for a tensor and
    for rows made from the maxima at `largest_ptr`. HARDWARE: whether the GPU has an instruction
    that rounds to FP8, ties to even.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < R)[:, None] & (column < C)[None, :]
    offs = row[:, None] * row_stride + column[None, :] * column_stride
    x = tl.load(x_ptr + offs, mask=inside, other=0).to(tl.float32)
    across = tl.num_programs(1)
    exponent: tl.constexpr = 8 if KIND == "e4m3" else 15
    first_columns = tl.program_id(1) == 0
    if SHARING == "tensor":
        if GIVEN:
            scale = tl.load(scales_ptr)
        else:
            scale = _scale_of(tl.load(largest_ptr), exponent)
            tl.store(scales_ptr, scale, mask=first_columns & (tl.program_id(0) == 0))
    elif SHARING == "rows":
        if GIVEN:
            of_rows = tl.load(scales_ptr + row, mask=row < R, other=1)
        else:
            of_rows = _scale_of(tl.load(largest_ptr + row, mask=row < R, other=1), exponent)
            tl.store(scales_ptr + row, of_rows, mask=(row < R) & first_columns)
        scale = of_rows[:, None]
    elif SHARING == "groups":
        scale_ptrs = scales_ptr + row * across + tl.program_id(1)
        if GIVEN:
            scale = tl.load(scale_ptrs, mask=row < R, other=1)[:, None]
        else:
            of_rows = _scale_of(tl.max(magnitude(x), axis=1), exponent)
            tl.store(scale_ptrs, of_rows, mask=row < R)
            scale = of_rows[:, None]
    else:
        scale_ptr = scales_ptr + tl.program_id(0) * across + tl.program_id(1)
        if GIVEN:
            scale = tl.load(scale_ptr)
        else:
            scale = _scale_of(tl.max(tl.max(magnitude(x), axis=1), axis=0), exponent)
            tl.store(scale_ptr, scale)
    scaled = x / scale
    most = E4M3_MOST if KIND == "e4m3" else E5M2_MOST
    # Saturated, as the reference does.
    scaled = tl.minimum(tl.maximum(scaled, -most), most)
    if HARDWARE:
        rounded = scaled.to(tl.float8e4nv if KIND == "e4m3" else tl.float8e5)
        code = rounded.to(tl.uint8, bitcast=True)
    else:
        code = to_e4m3(scaled) if KIND == "e4m3" else to_e5m2(scaled)
    tl.store(codes_ptr + row[:, None] * C + column[None, :], code, mask=inside)


@triton.jit
def _transpose(x_ptr, y_ptr, R, C, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(
        x_ptr + row[:, None] * C + column[None, :],
        mask=(row < R)[:, None] & (column < C)[None, :],
        other=0,
    )
    inside = (column < C)[:, None] & (row < R)[None, :]
    tl.store(y_ptr + column[:, None] * R + row[None, :], tl.trans(x), mask=inside)


def _run(
    x: torch.Tensor, kind: str, sharing: str, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    R, C = x.shape
    has_scales = scales is not None
    out_scales = x.new_empty(shape_of_scales(sharing, R, C), dtype=torch.float32)
    largest = None
    if scales is not None:
        # An operator may not return what it was given.
        out_scales.copy_(scales)
    elif sharing in ("tensor", "rows"):
        largest = amax(x, sharing)
        # No program runs that would store them.
        if not x.numel():
            out_scales.copy_(compute_scales(largest, kind))
    codes = x.new_empty((R, C), dtype=torch.uint8)
    if codes.numel():
        rows = BLOCK if sharing == "tiles" else ROWS
        _quantize[(cdiv(R, rows), cdiv(C, BLOCK))](
            *(x, codes, out_scales, largest, R, C, *x.stride()),
            SHARING=sharing,
            KIND=kind,
            GIVEN=has_scales,
            ROWS=rows,
            BLOCK=BLOCK,
            HARDWARE=has_float8(x.device),
            num_warps=8 if sharing == "tiles" else 4,
        )
    return codes, out_scales


def _transposed(codes: torch.Tensor) -> torch.Tensor:
    R, C = codes.shape
    transposed = codes.new_empty((C, R))
    if codes.numel():
        grid = (cdiv(R, TRANSPOSED), cdiv(C, TRANSPOSED))
        _transpose[grid](codes, transposed, R, C, TILE=TRANSPOSED, num_warps=8)
    return transposed


_transposed_of = operator(
    "float8_transpose", _transposed, fake=lambda codes: codes.new_empty(codes.shape[::-1])
)


def transpose(codes_RC: torch.Tensor) -> torch.Tensor:
    """The transpose, contiguous. PyTorch's copy of one-byte elements is slow: it took 2.2 ms of the
    6.6 ms of a layer's forward and backward on an H200."""
    return _transposed_of(codes_RC.view(torch.uint8)).view(codes_RC.dtype)


def _fake(
    x: torch.Tensor, kind: str, sharing: str, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    del kind, scales
    shape = shape_of_scales(sharing, *x.shape)
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(shape, dtype=torch.float32)


_quantized = operator("float8_quantize", _run, fake=_fake)


def quantize(
    x_RC: torch.Tensor, kind: Kind, sharing: Sharing, scales: torch.Tensor | None = None
) -> Float8Matrix:
    """Bitwise identical to the reference, of finite numbers; others leave the same scales."""
    codes, out_scales = _quantized(x_RC, kind, sharing, scales)
    return Float8Matrix(codes.view(DTYPES[kind]), out_scales, sharing)
