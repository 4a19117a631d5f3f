"""dequantize on Triton: one pass, codes in, numbers out. R rows of all matrices, K columns."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportReturnType=false

import torch
import triton
import triton.language as tl

from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.op import INTERPRETED
from penstock_kernels.quant.quantized_tensor import QuantizedTensor
from penstock_kernels.quant.triton_numbers import (
    decode_level,
    from_e4m3,
    from_e8m0,
    to_bf16_grid,
)

ELEMENTS = 4096
"""Elements in a tile."""


@triton.jit
def read(
    codes_ptr,
    scales_ptr,
    global_ptr,
    rows,
    inside,
    column,
    row_bytes,
    num_groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The values of some rows from a column on, float32 [ROWS, COLUMNS]; zeros outside.

    GROUP 0 is a scale for each row, else COLUMNS and `column` are multiples of it.
    """
    wide = rows.to(tl.int64)[:, None]
    if FORMAT == "int8" or FORMAT == "fp8" or FORMAT == "block_fp8":
        offs = column + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (offs < row_bytes)[None, :]
        code = tl.load(codes_ptr + wide * row_bytes + offs[None, :], mask=mask, other=0)
        if FORMAT == "int8":
            values = code.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            values = from_e4m3(code)
    else:
        offs = column // 2 + tl.arange(0, COLUMNS // 2)
        mask = inside[:, None] & (offs < row_bytes)[None, :]
        pair = tl.load(codes_ptr + wide * row_bytes + offs[None, :], mask=mask, other=0).to(
            tl.int32
        )
        values = tl.interleave(decode_level(pair & 15, FORMAT), decode_level(pair >> 4, FORMAT))
    if GROUP == 0:
        scale = tl.load(scales_ptr + wide, mask=inside[:, None], other=0)
        return values * scale
    else:
        group = column // GROUP + tl.arange(0, COLUMNS // GROUP)
        has_group = inside[:, None] & (group < num_groups)[None, :]
        scale = tl.load(scales_ptr + wide * num_groups + group[None, :], mask=has_group, other=0)
        if FORMAT == "nvfp4":
            global_scale = tl.load(global_ptr + wide, mask=inside[:, None], other=0)
            scale = from_e4m3(scale) * global_scale
        elif FORMAT == "mxfp4":
            scale = from_e8m0(scale)
        grouped = values.reshape(ROWS, COLUMNS // GROUP, GROUP) * scale[:, :, None]
        return grouped.reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=["R"])
def _dequantize(
    codes_ptr,
    scales_ptr,
    global_ptr,
    y_ptr,
    R,
    K,
    row_bytes,
    num_groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUND: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS
    inside = rows < R
    y = read(
        codes_ptr,
        scales_ptr,
        global_ptr,
        rows,
        inside,
        column,
        row_bytes,
        num_groups,
        FORMAT,
        GROUP,
        ROWS,
        COLUMNS,
    )
    if ROUND:
        y = to_bf16_grid(y)
    offs = column + tl.arange(0, COLUMNS)
    y_at = y_ptr + rows.to(tl.int64)[:, None] * K + offs[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (offs < K)[None, :])


def tile(columns: int, group: int | None) -> tuple[int, int]:
    """Rows and columns of a tile: whole groups, and no more columns than a row has."""
    width = max(min(next_power_of_2(columns), 512), group or 16)
    return max(ELEMENTS // width, 1), width


def pointers(quantized: QuantizedTensor) -> list[torch.Tensor | None]:
    """Its tensors as kernels take them: rows side by side, scales of 8 bits as bytes."""
    bytes_of = {name: tensor.contiguous() for name, tensor in quantized.tensors.items()}
    if quantized.format.scales != "float32":
        bytes_of["scales"] = bytes_of["scales"].view(torch.uint8)
    return [bytes_of["codes"], bytes_of["scales"], bytes_of.get("global_scales")]


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Bitwise identical to the reference."""
    format, shape = quantized.format, quantized.shape
    K = quantized.columns
    y = torch.empty(shape, dtype=dtype, device=quantized.codes.device)
    if not y.numel():
        return y
    R = y.numel() // K
    rows, columns = tile(K, format.group)
    _dequantize[(cdiv(R, rows), cdiv(K, columns))](
        *(*pointers(quantized), y, R, K, format.row_bytes(K), format.num_groups(K)),
        FORMAT=format.name,
        GROUP=format.group or 0,
        ROWS=rows,
        COLUMNS=columns,
        ROUND=INTERPRETED and dtype == torch.bfloat16,
    )
    return y
