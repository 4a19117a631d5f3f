"""group_gemm of 16-bit values on a CPU: groups are padded to a few heights.

oneDNN builds a program for each height, and caches a thousand of half a megabyte each. A router's
counts differ in every step, so it would build programs in every step. So a group's rows are
padded with zeros.
"""

import torch
import torch.nn.functional as F

from penstock_kernels.group_gemm.shapes import rows_of_groups

LOWEST = 32

HEIGHTS = 4
"""Of groups that are up to twice as high as others. A twelfth of what is multiplied are zeros, and
that is about as quick as without them by programs that are there already."""


def by_rows(x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """Each row times its group's matrix, zeros past the groups, [T, N]."""
    y_TN = x_TK.new_empty(x_TK.shape[0], weight_GNK.shape[1])
    end = 0
    for rows, matrix_NK in zip(rows_of_groups(counts_G), weight_GNK, strict=True):
        end = rows.stop
        y_TN[rows] = torch.mm(_filled(x_TK[rows]), matrix_NK.mT)[: end - rows.start]
    y_TN[end:] = 0
    return y_TN


def of_groups(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """a^T b over each group's rows, zeros without rows, [G, M, N]."""
    y_GMN = a_TM.new_empty(counts_G.shape[0], a_TM.shape[1], b_TN.shape[1])
    for rows, y_MN in zip(rows_of_groups(counts_G), y_GMN, strict=True):
        torch.mm(_filled(a_TM[rows]).mT, _filled(b_TN[rows]), out=y_MN)
    return y_GMN


def padded_height(rows: int) -> int:
    """The height, at least as high, to which so many rows are padded."""
    step = max(LOWEST, (1 << max(0, rows - 1).bit_length()) // 2 // HEIGHTS)
    return -(-rows // step) * step


def _filled(x_CK: torch.Tensor) -> torch.Tensor:
    """Padded with zeros."""
    missing = padded_height(x_CK.shape[0]) - x_CK.shape[0]
    return F.pad(x_CK, (0, 0, 0, missing)) if missing else x_CK
