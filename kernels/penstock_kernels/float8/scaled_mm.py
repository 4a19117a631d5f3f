"""FP8 matmuls of PyTorch, on tensor cores: one scale for each matrix, or for each of its rows.

M and N rows of two matrices, K columns (the contracted dimension).
"""

import torch
import torch.nn.functional as F

from penstock_kernels.float8.float8_matrix import Float8Matrix, Sums

MULTIPLE = 16
"""CUDA takes only so many columns at a time."""


def multiply(
    a_MK: Float8Matrix, b_NK: Float8Matrix, dtype: torch.dtype, sums: Sums = "exact"
) -> torch.Tensor:
    """Same as the reference, except for the order of sums."""
    a, b = (_whole(each.codes) for each in (a_MK, b_NK))
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


def _whole(codes: torch.Tensor) -> torch.Tensor:
    """Columns padded with zeros to the multiple that CUDA requires."""
    if not codes.is_cuda:
        return codes
    missing = -codes.shape[1] % MULTIPLE
    # F.pad does not support float8.
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes
