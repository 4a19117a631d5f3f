"""Matmul of few rows with a quantized matrix on Triton, dequantized in registers.

T rows of x, N rows and K columns of the matrix.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.op import INTERPRETED, needs_cuda
from penstock_kernels.quant.quantized_tensor import QuantizedTensor
from penstock_kernels.quant.triton_dequantize import pointers, read
from penstock_kernels.quant.triton_numbers import to_bf16_grid
from penstock_kernels.tuning import select_config

# One tile of x: with more rows, codes would be read and decoded more than once.
MOST_ROWS = 64

MOST_GROUP = 128
COLUMNS = 128
"""Contracted dimension of a tile."""


class Tile(NamedTuple):
    """Tile sizes and launch settings of a program."""

    weight_rows: int
    warps: int
    stages: int


TILES = (Tile(32, 4, 4), Tile(16, 4, 4), Tile(64, 4, 4), Tile(32, 4, 2))
"""The rule's choice, and the autotuning candidates."""


@triton.jit(do_not_specialize=["T"])
def _multiply(
    x_ptr,
    codes_ptr,
    scales_ptr,
    global_ptr,
    y_ptr,
    T,
    N,
    K,
    row_bytes,
    num_groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    X_ROWS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """X_ROWS x WEIGHT_ROWS of y."""
    token = tl.arange(0, X_ROWS)
    row = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
    acc = tl.zeros([X_ROWS, WEIGHT_ROWS], dtype=tl.float32)
    for column in range(0, K, COLUMNS):
        offs = column + tl.arange(0, COLUMNS)
        x_at = x_ptr + token[:, None] * K + offs[None, :]
        x = tl.load(x_at, mask=(token < T)[:, None] & (offs < K)[None, :], other=0)
        weight = read(
            codes_ptr,
            scales_ptr,
            global_ptr,
            row,
            row < N,
            column,
            row_bytes,
            num_groups,
            FORMAT,
            GROUP,
            WEIGHT_ROWS,
            COLUMNS,
        )
        # Rounded like a dequantized matrix.
        if UPCAST:
            if x.dtype == tl.bfloat16:
                weight = to_bf16_grid(weight)
            weight = weight.to(x.dtype).to(tl.float32)
            x = x.to(tl.float32)
        else:
            weight = weight.to(x.dtype)
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    y_at = y_ptr + token[:, None] * N + row[None, :]
    if UPCAST and y_ptr.dtype.element_ty == tl.bfloat16:
        acc = to_bf16_grid(acc)
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(token < T)[:, None] & (row < N)[None, :])


def matmul(x_TK: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
    """x W^T, [T, N] in x's dtype; sums in float32."""
    format = quantized.format
    x_TK = x_TK.contiguous()
    (T, K), N = x_TK.shape, quantized.shape[0]
    y_TN = torch.empty(T, N, dtype=x_TK.dtype, device=x_TK.device)
    tensors = pointers(quantized)
    x_rows = max(16, next_power_of_2(T))

    def launch(tile: Tile) -> None:
        _multiply[(cdiv(N, tile.weight_rows),)](
            *(x_TK, *tensors, y_TN, T, N, K, format.row_bytes(K), format.num_groups(K)),
            FORMAT=format.name,
            GROUP=format.group or 0,
            X_ROWS=x_rows,
            WEIGHT_ROWS=tile.weight_rows,
            COLUMNS=COLUMNS,
            UPCAST=INTERPRETED,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    if y_TN.numel():
        kind = f"{format.name} {format.group}"
        launch(select_config(_multiply, x_TK, (x_rows, N, K), TILES, launch, kind))
    return y_TN


def unsupported_reason(x_TK: torch.Tensor, quantized: QuantizedTensor) -> str | None:
    """Why these inputs are not supported; None if they are."""
    group = quantized.format.group
    if x_TK.ndim != 2 or quantized.shape[1:] != x_TK.shape[1:]:
        return f"x is {tuple(x_TK.shape)}, and the matrix {quantized.shape}"
    if x_TK.shape[0] > MOST_ROWS:
        return f"x has {x_TK.shape[0]} rows; from {MOST_ROWS + 1} on dequantizing once is cheaper"
    if group is not None and group > MOST_GROUP:
        return f"groups of {group} columns are wider than its tiles"
    if x_TK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {x_TK.dtype}"
    if x_TK.dtype == torch.float32 and not INTERPRETED:
        # Without tensor cores its tiles would be spilled.
        return "x is in float32, and it takes bfloat16 and float16"
    return needs_cuda(x_TK, *quantized.tensors.values())
