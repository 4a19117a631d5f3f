"""Block-scaled FP8 matmuls on Triton, with a scale for 128 columns.

The partial sum of a group's columns is multiplied by its scales and added in float32, because
tensor cores accumulate FP8 products with few bits (DeepSeek-AI 2024, "DeepSeek-V3", section
3.3.2).

M and N rows of two matrices, K columns (the contracted dimension).
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import operator
from penstock_kernels.float8.float8_matrix import BLOCK, DTYPES, Float8Matrix, Sums
from penstock_kernels.launch_sizes import cdiv
from penstock_kernels.op import INTERPRETED
from penstock_kernels.quant.triton_numbers import from_e4m3, to_bf16_grid

TILE = 128
WARPS, STAGES = 8, 4
# Rows of tiles whose columns are computed one after another, while they are in the cache.
BAND = 8


@triton.jit
def from_e5m2(code):
    """The number of each byte, float32: the upper half of a float16."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(code, KIND: tl.constexpr):
    if KIND == "e4m3":
        return from_e4m3(code)
    else:
        return from_e5m2(code)


@triton.jit
def _multiply(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    y_ptr,
    M,
    N,
    K,
    groups,
    A_KIND: tl.constexpr,
    B_KIND: tl.constexpr,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    BAND: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of y. A_ROWS, B_ROWS: rows that share a scale. UPCAST: codes come as bytes."""
    down, across = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    in_band = BAND * across
    first = tl.program_id(0) // in_band * BAND
    tall = tl.minimum(down - first, BAND)
    m = (first + tl.program_id(0) % in_band % tall).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = (tl.program_id(0) % in_band // tall).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for group in range(0, groups):
        k = group * BLOCK + tl.arange(0, BLOCK)
        a_inside = (m < M)[:, None] & (k < K)[None, :]
        b_inside = (n < N)[:, None] & (k < K)[None, :]
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=a_inside, other=0.0)
        b = tl.load(b_ptr + n[:, None] * K + k[None, :], mask=b_inside, other=0.0)
        a_scale = tl.load(a_scales_ptr + m // A_ROWS * groups + group, mask=m < M, other=0)
        b_scale = tl.load(b_scales_ptr + n // B_ROWS * groups + group, mask=n < N, other=0)
        if UPCAST:
            a, b = _number(a, A_KIND), _number(b, B_KIND)
        acc += tl.dot(a, b.T, input_precision="ieee") * a_scale[:, None] * b_scale[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    # The interpreter's own cast drops bits.
    if UPCAST and y_ptr.dtype.element_ty == tl.bfloat16:
        acc = to_bf16_grid(acc)
    y_at = y_ptr + m[:, None] * N + n[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=inside)


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    a_kind: str,
    b_kind: str,
    tiles: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a and b as bytes; tiles: which of the two have scales of tiles, by these letters."""
    (M, K), N = a.shape, len(b)
    y = a.new_empty((M, N), dtype=dtype)
    if y.numel():
        # The interpreter takes codes as bytes.
        codes = (a, b) if INTERPRETED else (a.view(DTYPES[a_kind]), b.view(DTYPES[b_kind]))
        _multiply[(cdiv(M, TILE) * cdiv(N, TILE),)](
            *(*codes, a_scales, b_scales, y, M, N, K, a_scales.shape[1]),
            A_KIND=a_kind,
            B_KIND=b_kind,
            A_ROWS=BLOCK if "a" in tiles else 1,
            B_ROWS=BLOCK if "b" in tiles else 1,
            TILE_M=TILE,
            TILE_N=TILE,
            BLOCK=BLOCK,
            BAND=BAND,
            UPCAST=INTERPRETED,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return y


def _fake(a: torch.Tensor, b: torch.Tensor, *args: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=args[-1])


_product = operator("float8_multiply", _run, fake=_fake)


def multiply(
    a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype, sums: Sums = "exact"
) -> torch.Tensor:
    """Same as the reference, except for the order of sums."""
    del sums
    matrices = {"a": a_MK, "b": b_NK}
    tiles = "".join(name for name, matrix in matrices.items() if matrix.sharing == "tiles")
    codes = (matrix.codes.view(torch.uint8) for matrix in (a_MK, b_NK))
    scales = (matrix.scales.contiguous() for matrix in (a_MK, b_NK))
    kinds = ("e4m3" if matrix.codes.dtype == DTYPES["e4m3"] else "e5m2" for matrix in (a_MK, b_NK))
    return _product(*codes, *scales, *kinds, tiles, dtype)
