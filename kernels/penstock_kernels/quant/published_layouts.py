"""Published quantized matrices, converted to `QuantizedTensor` without requantization.

..., N rows and K columns; G groups of a row.
"""

import math
from collections.abc import Sequence

import torch

from penstock_kernels.quant.formats import FORMATS, get_format
from penstock_kernels.quant.quantized_tensor import QuantizedTensor

TILE = FORMATS["block_fp8"].tile_rows


def nf4_of_bitsandbytes(
    packed: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], group: int = 64
) -> QuantizedTensor:
    """bitsandbytes' NF4: `packed` (uint8) and one scale for each group of the flattened matrix.

    bitsandbytes stores the earlier column in the high four bits of a byte, `QuantizedTensor` in the
    low ones; everything else is equal if groups end where rows do. For double quantization, compute
    the scales with `bitsandbytes_scales`.

    Raises:
        ValueError: rows are not whole groups, or there are fewer numbers than the shape has.
    """
    *rows, columns = shape
    if columns % group or packed.numel() * 2 != math.prod(shape):
        raise ValueError(
            f"{packed.numel()} bytes of two codes in groups of {group} are no rows of whole groups "
            f"in {tuple(shape)}; dequantize with bitsandbytes and quantize the result"
        )
    codes = packed.reshape(*rows, columns // 2)
    return QuantizedTensor(
        get_format("nf4", group),
        columns,
        codes >> 4 | codes << 4,
        scales.float().reshape(*rows, columns // group),
    )


def bitsandbytes_scales(
    codes: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor,
    offset: float,
    group: int = 256,
) -> torch.Tensor:
    """Scales of bitsandbytes' double quantization, flat, float32.

    `codes` index 256 levels (`quant_map`), which are multiplied by `scales` (`nested_absmax`), one
    for `group` codes; `offset` is the mean, which was subtracted before.
    """
    values = levels[codes.flatten().int()]
    return values * scales.repeat_interleave(group)[: len(values)] + offset


def nvfp4_of_modelopt(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor
) -> QuantizedTensor:
    """ModelOpt's NVFP4: codes uint8 [..., N, K/2], e4m3 scales [..., N, K/16], one of a matrix."""
    *outer, rows, half = weight.shape
    global_scales = weight_scale_2.float().reshape(*outer, 1, 1).expand(*outer, rows, 1)
    return QuantizedTensor(
        FORMATS["nvfp4"], 2 * half, weight, weight_scale, global_scales.contiguous()
    )


def mxfp4_of_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedTensor:
    """gpt-oss's MXFP4: codes uint8 [..., N, G, 16] and scales uint8 [..., N, G]."""
    codes = blocks.flatten(-2)
    scales = scales.view(torch.float8_e8m0fnu)
    return QuantizedTensor(FORMATS["mxfp4"], 2 * codes.shape[-1], codes, scales)


def of_fp8_tiles(
    weight: torch.Tensor, weight_scale_inv: torch.Tensor, first_row: int = 0
) -> QuantizedTensor:
    """FP8 in tiles of 128 x 128: e4m3 [..., N, K] and float32 [..., N/128, K/128], rounded up.

    For a range of a matrix's rows, `first_row` is the index of the first, and the scales begin with
    the tiles of that row.
    """
    within, rows = first_row % TILE, weight.shape[-2]
    scales = weight_scale_inv.float().repeat_interleave(TILE, -2)
    return QuantizedTensor(
        FORMATS["block_fp8"],
        weight.shape[-1],
        weight.view(torch.uint8),
        scales.narrow(-2, within, rows).contiguous(),
    )


def tile_scales(quantized: QuantizedTensor) -> torch.Tensor:
    """weight_scale_inv of block_fp8, [..., N/128, G]: of a whole matrix, or one from a tile's
    first row on.
    """
    return quantized.scales[..., ::TILE, :]
