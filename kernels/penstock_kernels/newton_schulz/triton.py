"""newton_schulz on Triton: one half of symmetric products is computed, and written twice.

Two of a step's three products are symmetric, so it does 2/3 of the work for square matrices.
B matrices, N rows, K columns.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.newton_schulz.reference import (
    COEFFICIENTS,
    STEPS,
    require_matrices,
    scaled,
    turned,
)
from penstock_kernels.op import INTERPRETED
from penstock_kernels.quant.triton_numbers import to_bf16_grid
from penstock_kernels.tuning import select_config, shared_memory_per_block


class Tile(NamedTuple):
    """Tile sizes and launch settings of a program."""

    rows: int
    depth: int
    warps: int
    stages: int


LEAST, TILE, DEPTH = 16, 128, 64
"""Rows and columns of a program, at least and at most, and how much of their products is taken at a
time."""

OTHERS = (Tile(128, 64, 4, 3), Tile(128, 64, 8, 4), Tile(64, 64, 4, 4))
"""Autotuning candidates for large matrices."""


@cache
def others(itemsize: int, shared_memory: int) -> list[Tile]:
    """Those of OTHERS that fit into so many bytes of shared memory."""
    return [
        tile
        for tile in OTHERS
        if 2 * tile.rows * tile.depth * tile.stages * itemsize < shared_memory
    ]


@triton.jit(do_not_specialize=["times", "plus"])
def _symmetric(
    x_ptr,
    add_ptr,
    y_ptr,
    N,
    K,
    times,
    plus,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A tile of y = times x x' + plus add and the one across the diagonal; add is symmetric, or
    None."""
    # Tiles on and below the diagonal are counted row by row: row i begins at i (i + 1) / 2.
    tile = tl.program_id(0)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    # An inexact square root would give the next row, or the one before.
    i -= (i * (i + 1) // 2 > tile).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= tile).to(tl.int32)
    j = tile - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    row = (i * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (j * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    x_ptr += matrix * N * K
    acc = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + depth
        offs = row[:, None] * K + k[None, :]
        left = tl.load(x_ptr + offs, mask=(row < N)[:, None] & (k < K)[None, :], other=0)
        offs = column[None, :] * K + k[:, None]
        right = tl.load(x_ptr + offs, mask=(column < N)[None, :] & (k < K)[:, None], other=0)
        if UPCAST:
            acc += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(left, right, acc)
    acc *= times
    offs = matrix * N * N + row[:, None] * N + column[None, :]
    inside = (row < N)[:, None] & (column < N)[None, :]
    if add_ptr is not None:
        acc += plus * tl.load(add_ptr + offs, mask=inside, other=0).to(tl.float32)
    if UPCAST:
        acc = to_bf16_grid(acc)
    y = acc.to(tl.bfloat16)
    tl.store(y_ptr + offs, y, mask=inside)
    if i != j:
        across = matrix * N * N + column[:, None] * N + row[None, :]
        tl.store(y_ptr + across, tl.trans(y), mask=(column < N)[:, None] & (row < N)[None, :])


def newton_schulz(matrix_NK: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """Same as the reference, with fused multiply-adds."""
    require_matrices(matrix_NK, steps)
    a, b, c = COEFFICIENTS
    x = scaled(matrix_NK)
    shape = x.shape
    x_BNK = x.view(math.prod(shape[:-2]), *shape[-2:])
    for _ in range(steps if x.numel() else 0):
        gram = _product(x_BNK, 1.0)
        of_gram = _product(gram, c, gram, b)
        x_BNK = torch.baddbmm(x_BNK, of_gram, x_BNK, beta=a)
    return turned(x_BNK.view(shape), matrix_NK)


def _product(
    x_BNK: torch.Tensor, times: float, add_BNN: torch.Tensor | None = None, plus: float = 0.0
) -> torch.Tensor:
    """times x x' + plus add, [B, N, N]."""
    B, N, K = x_BNK.shape
    y_BNN = x_BNK.new_empty(B, N, N)
    rows = min(TILE, max(LEAST, next_power_of_2(N)))
    depth = min(DEPTH, max(LEAST, next_power_of_2(K)))
    first = Tile(rows, depth, 8 if rows == TILE else 4, 3)

    def launch(tile: Tile) -> None:
        across = cdiv(N, tile.rows)
        _symmetric[(across * (across + 1) // 2, B)](
            *(x_BNK, add_BNN, y_BNN, N, K, times, plus),
            ROWS=tile.rows,
            DEPTH=tile.depth,
            UPCAST=INTERPRETED,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    several = [first]
    if rows == TILE and depth == DEPTH:
        several += others(x_BNK.element_size(), shared_memory_per_block(x_BNK.device))
    kind = "alone" if add_BNN is None else "added"
    launch(select_config(_symmetric, x_BNK, (B, N, K), several, launch, kind))
    return y_BNN
