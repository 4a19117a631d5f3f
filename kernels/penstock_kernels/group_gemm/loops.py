"""group_gemm on a host, one group after another.

`loops` is the reference's loop as a custom operator, for inputs that no faster backend supports:
torch.compile keeps it in the graph; the plain loop, which reads the counts on the host, would break
the graph.

`native` pads groups of 16-bit values on a CPU to a few heights. oneDNN builds a program for each
height, and caches a thousand of half a megabyte each. A router's counts differ in every step, so it
would build programs in every step. So a group's rows are padded with zeros.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from penstock_kernels.group_gemm.autograd import operators
from penstock_kernels.group_gemm.reference import group_gemm as _by_rows

LOWEST = 32

# Of groups that are up to twice as high as others. A twelfth of what is multiplied are zeros, and
# that is about as quick as without them by programs that are there already.
HEIGHTS = 4


def padded_by_rows(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> torch.Tensor:
    """Each row times its group's matrix, zeros past the groups, [T, N]."""
    y_TN = x_TK.new_empty(x_TK.shape[0], weight_GNK.shape[1])
    end = 0
    for rows, matrix_NK in zip(_rows_of_groups(counts_G), weight_GNK, strict=True):
        end = rows.stop
        y_TN[rows] = torch.mm(_filled(x_TK[rows]), matrix_NK.mT)[: end - rows.start]
    # Rows past the groups have no matrix; their memory is not yet written.
    y_TN[end:] = 0
    return y_TN


def padded_of_groups(
    a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor
) -> torch.Tensor:
    """a^T b over each group's rows, zeros without rows, [G, M, N]."""
    y_GMN = a_TM.new_empty(counts_G.shape[0], a_TM.shape[1], b_TN.shape[1])
    for rows, y_MN in zip(_rows_of_groups(counts_G), y_GMN, strict=True):
        torch.mm(_filled(a_TM[rows]).mT, _filled(b_TN[rows]), out=y_MN)
    return y_GMN


def padded_height(rows: int) -> int:
    """The height, at least as high, to which so many rows are padded."""
    step = max(LOWEST, (1 << max(0, rows - 1).bit_length()) // 2 // HEIGHTS)
    return -(-rows // step) * step


def _filled(x_CK: torch.Tensor) -> torch.Tensor:
    missing = padded_height(x_CK.shape[0]) - x_CK.shape[0]
    return F.pad(x_CK, (0, 0, 0, missing)) if missing else x_CK


def _of_groups(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    y_GMN = a_TM.new_empty(counts_G.shape[0], a_TM.shape[1], b_TN.shape[1])
    for rows, y_MN in zip(_rows_of_groups(counts_G), y_GMN, strict=True):
        torch.mm(a_TM[rows].mT, b_TN[rows], out=y_MN)
    return y_GMN


def _rows_of_groups(counts_G: torch.Tensor) -> Iterator[slice]:
    """Slices of each group's rows, on the host, which synchronizes."""
    start = 0
    for count in counts_G.tolist():
        yield slice(start, start + count)
        start += count


PRODUCTS = operators("loops", _by_rows, _of_groups)
