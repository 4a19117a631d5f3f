"""quantize on Triton: one pass, and one before it where scales reach beyond a group or tile.

R rows of all matrices, K columns; for tiles, M matrices of N rows.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from penstock_kernels.launch_sizes import cdiv
from penstock_kernels.quant.formats import FORMATS, Format
from penstock_kernels.quant.quantized_tensor import QuantizedTensor
from penstock_kernels.quant.reference import (
    fp8_scales,
    int8_scales,
    nvfp4_global_scales,
    require_finite,
    require_matrix,
)
from penstock_kernels.quant.scales import row_maxima
from penstock_kernels.quant.triton_dequantize import tile
from penstock_kernels.quant.triton_numbers import (
    E2M1_MOST,
    E4M3_MOST,
    INT4_MOST,
    INT8_MOST,
    SMALLEST,
    e2m1_code,
    from_e8m0,
    magnitude,
    nf4_code,
    round_even,
    to_e4m3,
)

TILE = FORMATS["block_fp8"].tile_rows


# R is another for each matrix, and Triton compiles anew for a multiple of 16.
@triton.jit(do_not_specialize=["R"])
def _by_groups(
    w_ptr,
    codes_ptr,
    scales_ptr,
    largest_ptr,
    R,
    K,
    row_bytes,
    num_groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes of two to a byte, and their groups' scales. largest_ptr: of each row's matrix."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS
    inside = (rows < R)[:, None]
    wide = rows.to(tl.int64)[:, None]
    offs = column + tl.arange(0, COLUMNS)
    x = tl.load(w_ptr + wide * K + offs[None, :], mask=inside & (offs < K)[None, :], other=0)
    x = x.to(tl.float32).reshape(ROWS, COLUMNS // GROUP, GROUP)
    most = tl.maximum(tl.max(magnitude(x), axis=2), SMALLEST)
    if FORMAT == "nf4":
        scale = most
        # Triton's `/` of float32 is approximate on GPUs; codes must equal the reference's.
        code = nf4_code(tl.div_rn(x, scale[:, :, None]))
    elif FORMAT == "int4":
        scale = tl.div_rn(most, INT4_MOST)
        step = round_even(tl.div_rn(x, scale[:, :, None]))
        code = (tl.minimum(tl.maximum(step, -INT4_MOST), INT4_MOST) + 8).to(tl.int32)
    elif FORMAT == "mxfp4":
        exponent = (most.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
        scale = tl.where(exponent == 255, 255, exponent - 2).to(tl.uint8)
        scaled = tl.div_rn(x, from_e8m0(scale)[:, :, None])
        code = e2m1_code(tl.minimum(tl.maximum(scaled, -E2M1_MOST), E2M1_MOST))
    else:
        largest = tl.maximum(tl.load(largest_ptr + wide, mask=inside, other=1), SMALLEST)
        scale = to_e4m3(tl.minimum(tl.div_rn(most, largest) * E4M3_MOST, E4M3_MOST))
        scaled = x * tl.div_rn(E2M1_MOST, most)[:, :, None]
        code = e2m1_code(tl.minimum(tl.maximum(scaled, -E2M1_MOST), E2M1_MOST))
    group = column // GROUP + tl.arange(0, COLUMNS // GROUP)
    has_group = inside & (group < num_groups)[None, :]
    tl.store(scales_ptr + wide * num_groups + group[None, :], scale, mask=has_group)
    low, high = tl.split(code.reshape(ROWS, COLUMNS // 2, 2))
    byte = column // 2 + tl.arange(0, COLUMNS // 2)
    codes_at = codes_ptr + wide * row_bytes + byte[None, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(codes_at, packed, mask=inside & (byte < row_bytes)[None, :])


@triton.jit(do_not_specialize=["R"])
def _by_rows(
    w_ptr,
    codes_ptr,
    scales_ptr,
    R,
    K,
    num_groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes of a byte, given the scales of rows, or of their groups where GROUP is not 0."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS
    offs = column + tl.arange(0, COLUMNS)
    inside = (rows < R)[:, None] & (offs < K)[None, :]
    wide = rows.to(tl.int64)[:, None]
    element = wide * K + offs[None, :]
    x = tl.load(w_ptr + element, mask=inside, other=0).to(tl.float32)
    if GROUP == 0:
        scaled = tl.div_rn(x, tl.load(scales_ptr + wide, mask=(rows < R)[:, None], other=1))
    else:
        group = column // GROUP + tl.arange(0, COLUMNS // GROUP)
        has_group = (rows < R)[:, None] & (group < num_groups)[None, :]
        scale = tl.load(scales_ptr + wide * num_groups + group[None, :], mask=has_group, other=1)
        grouped = x.reshape(ROWS, COLUMNS // GROUP, GROUP)
        scaled = tl.div_rn(grouped, scale[:, :, None]).reshape(ROWS, COLUMNS)
    if FORMAT == "int8":
        step = tl.minimum(tl.maximum(round_even(scaled), -INT8_MOST), INT8_MOST)
        code = step.to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        code = to_e4m3(tl.minimum(tl.maximum(scaled, -E4M3_MOST), E4M3_MOST))
    tl.store(codes_ptr + element, code, mask=inside)


@triton.jit
def _by_tiles(w_ptr, codes_ptr, scales_ptr, N, K, num_groups, TILE: tl.constexpr):
    """e4m3 codes of one tile, and its scale for each of its rows."""
    down = tl.cdiv(N, TILE)
    matrix = (tl.program_id(0) // down).to(tl.int64)
    row = tl.program_id(0) % down * TILE + tl.arange(0, TILE)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < N)[:, None] & (offs < K)[None, :]
    rows = matrix * N + row
    element = rows[:, None] * K + offs[None, :]
    x = tl.load(w_ptr + element, mask=inside, other=0).to(tl.float32)
    most = tl.max(tl.max(magnitude(x), axis=1), axis=0)
    scale = tl.maximum(tl.div_rn(most, E4M3_MOST), SMALLEST)
    scaled = tl.div_rn(x, scale)
    scaled = tl.minimum(tl.maximum(scaled, -E4M3_MOST), E4M3_MOST)
    tl.store(codes_ptr + element, to_e4m3(scaled), mask=inside)
    tile_scales = tl.zeros([TILE], dtype=tl.float32) + scale
    tl.store(scales_ptr + rows * num_groups + tl.program_id(1), tile_scales, mask=row < N)


def quantize(
    weight_NK: torch.Tensor,
    format: Format,
    largest: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Bitwise identical to the reference."""
    require_matrix(weight_NK)
    in_tiles = format.tile_rows > 1 and largest is None
    magnitudes = None if in_tiles else row_maxima(weight_NK, format, largest)
    weight = weight_NK.contiguous()
    *outer, N, K = weight.shape
    R = weight.numel() // K
    row_bytes, num_groups = format.row_bytes(K), format.num_groups(K)

    def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*outer, N, width, dtype=dtype, device=weight.device)

    codes = empty(row_bytes, torch.uint8)
    rows, columns = tile(K, format.group)
    grid = cdiv(R, rows), cdiv(K, columns)
    of = {"FORMAT": format.name, "GROUP": format.group or 0, "ROWS": rows, "COLUMNS": columns}
    global_scales = None
    if in_tiles:
        scales = empty(num_groups, torch.float32)
        tiles = R // N * cdiv(N, TILE), num_groups
        _by_tiles[tiles](weight, codes, scales, N, K, num_groups, TILE=TILE, num_warps=8)
    elif format.codes == "levels":
        scales = empty(num_groups, format.scales_dtype)
        if magnitudes is not None:
            magnitudes = magnitudes.contiguous()
            global_scales = nvfp4_global_scales(magnitudes)
        stored = scales if format.scales == "float32" else scales.view(torch.uint8)
        _by_groups[grid](weight, codes, stored, magnitudes, R, K, row_bytes, num_groups, **of)
    else:
        assert magnitudes is not None
        scales_of = int8_scales if format.codes == "int8" else fp8_scales
        scales = scales_of(magnitudes).contiguous()
        _by_rows[grid](weight, codes, scales, R, K, num_groups, **of)
    return require_finite(QuantizedTensor(format, K, codes, scales, global_scales))
