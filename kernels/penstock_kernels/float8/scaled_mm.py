"""FP8 matmuls of PyTorch, on tensor cores: tensorwise and rowwise scaling; on Hopper also 1x128 and
128x128 block scaling.

M and N rows of two matrices, K columns (the contracted dimension).
"""

from functools import cache

import torch
import torch.nn.functional as F

from penstock_kernels.float8.float8_matrix import BLOCK, Float8Matrix, Sums

MULTIPLE = 16
"""CUDA takes only so many columns at a time."""

# cuBLAS pads scales of 128x128 blocks to a multiple of 4 along columns; other sizes are not
# supported here.
BLOCKS_ALIGNED = 4


def multiply(
    a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype, sums: Sums = "exact"
) -> torch.Tensor:
    """Same as the reference, except for the order of sums."""
    if a_MK.sharing == "groups":
        return _multiply_blocks(a_MK, b_NK, dtype)
    a, b = (_whole(matrix.codes) for matrix in (a_MK, b_NK))
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=a_MK.scales if a_MK.sharing == "rows" else a_MK.scales.reshape(()),
        scale_b=b_NK.scales.t() if b_NK.sharing == "rows" else b_NK.scales.reshape(()),
        out_dtype=dtype,
        use_fast_accum=sums == "fast",
    )


def unsupported_reason(
    a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype, sums: Sums = "exact"
) -> str | None:
    """Why these inputs are not supported."""
    del sums
    if a_MK.codes.shape[1] != b_NK.codes.shape[1]:
        return f"the matrices are {tuple(a_MK.codes.shape)} and {tuple(b_NK.codes.shape)}"
    sharing = a_MK.sharing
    if sharing == "groups" and b_NK.sharing in ("groups", "tiles"):
        return _unsupported_blocks(a_MK, b_NK, dtype)
    if sharing != b_NK.sharing or sharing not in ("tensor", "rows"):
        return f"it has no scales of {sharing} by {b_NK.sharing}"
    if not (a_MK.codes.numel() and b_NK.codes.numel()):
        return "there are no numbers"
    if not a_MK.codes.is_cuda:
        return None
    if len(b_NK.codes) % MULTIPLE:
        return f"{len(b_NK.codes)} rows of the second matrix are no multiple of {MULTIPLE}"
    if sharing == "rows" and dtype != torch.bfloat16:
        return f"with scales of rows it gives bfloat16, not {dtype}"
    if a_MK.codes.dtype == b_NK.codes.dtype == torch.float8_e5m2:
        return "both matrices are e5m2"
    return None


def _multiply_blocks(a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype) -> torch.Tensor:
    groups, tiles = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    of_tiles = b_NK.sharing == "tiles"
    # cuBLAS takes 1x128 scales in column-major order, and 128x128 scales in row-major order.
    return F.scaled_mm(
        a_MK.codes,
        b_NK.codes.t(),
        _column_major(a_MK.scales),
        groups,
        b_NK.scales.t() if of_tiles else _column_major(b_NK.scales),
        tiles if of_tiles else groups,
        output_dtype=dtype,
    )


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    return scales.t().contiguous().t()


def _unsupported_blocks(a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype) -> str | None:
    if not (a_MK.codes.is_cuda and _supports_block_scaling(a_MK.codes.device)):
        return "block scaling needs a Hopper GPU and CUDA 12.9 or newer"
    if dtype != torch.bfloat16:
        return f"with block scaling it gives bfloat16, not {dtype}"
    if not a_MK.codes.dtype == b_NK.codes.dtype == torch.float8_e4m3fn:
        return "block scaling takes e4m3 matrices only"
    (M, K), N = a_MK.codes.shape, len(b_NK.codes)
    if b_NK.sharing == "tiles" and N <= BLOCK:
        return f"the second matrix has {N} rows, and 128x128 scaling takes more than {BLOCK}"
    columns = BLOCK * (BLOCKS_ALIGNED if b_NK.sharing == "tiles" else 1)
    if not (M and N and K) or M % MULTIPLE or N % MULTIPLE or K % columns:
        return f"rows are no multiple of {MULTIPLE}, or columns none of {columns}: {M}, {N}, {K}"
    return None


@cache
def _supports_block_scaling(device: torch.device) -> bool:
    # cuBLAS supports it on compute capability 9.0 only, from CUDA 12.9 on.
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and cuda >= (12, 9)


def _whole(codes: torch.Tensor) -> torch.Tensor:
    if not codes.is_cuda:
        return codes
    # Zeros up to the multiple of columns that CUDA requires.
    missing = -codes.shape[1] % MULTIPLE
    # F.pad does not support float8.
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes
