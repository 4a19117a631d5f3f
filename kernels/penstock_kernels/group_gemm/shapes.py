"""Inputs that no fast implementation of group_gemm supports, and shared helpers for layouts."""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

VECTOR = 16
"""Bytes that group GEMMs copy at a time; rows must be a multiple of it."""


def unsupported_shapes(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> str | None:
    """Inconsistent operands, or dtypes that no device's matmul supports."""
    if reason := unsupported_pairs(x_TK, weight_GNK, counts_G):
        return reason
    if x_TK.dtype not in DTYPES:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"x and its weight are {x_TK.dtype}; they must be one of {takes}"
    return None


def unsupported_pairs(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> str | None:
    """Inconsistent operands, for any implementation."""
    x, weight, counts = (tuple(part.shape) for part in (x_TK, weight_GNK, counts_G))
    if len(x) != 2 or len(weight) != 3 or x[1] != weight[2] or counts != weight[:1]:
        return (
            f"x is {x}, its weight {weight} and the counts {counts}; "
            "they must be [T, K], [G, N, K] and [G]"
        )
    if x_TK.dtype != weight_GNK.dtype:
        return f"x is {x_TK.dtype} and its weight {weight_GNK.dtype}; they must be alike"
    if counts_G.dtype not in (torch.int32, torch.int64):
        return f"the counts are {counts_G.dtype}; they must be int32 or int64"
    return None


def unsupported_widths(x_TK: torch.Tensor, weight_GNK: torch.Tensor) -> str | None:
    """Rows that are not a whole number of vectors."""
    for name, width in (("K", weight_GNK.shape[2]), ("N", weight_GNK.shape[1])):
        if width * x_TK.element_size() % VECTOR:
            step = VECTOR // x_TK.element_size()
            return f"{name} is {width}; it takes multiples of {step} ({VECTOR} bytes) alone"
    return None


def with_unit_stride(weight_GNK: torch.Tensor) -> torch.Tensor:
    """weight_GNK itself where one of its last two dimensions is contiguous, else a copy."""
    return weight_GNK if 1 in weight_GNK.stride()[-2:] else weight_GNK.contiguous()
