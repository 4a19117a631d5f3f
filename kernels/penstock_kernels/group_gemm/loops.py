"""group_gemm by the reference's loop as a custom operator: for inputs that no faster backend
supports.

torch.compile keeps it in the graph; the plain loop, which reads the counts on the host, would
break the graph.
"""

import torch

from penstock_kernels.group_gemm.autograd import operators
from penstock_kernels.group_gemm.reference import group_gemm as _by_rows
from penstock_kernels.group_gemm.shapes import rows_of_groups


def _of_groups(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    y_GMN = a_TM.new_empty(counts_G.shape[0], a_TM.shape[1], b_TN.shape[1])
    for rows, y_MN in zip(rows_of_groups(counts_G), y_GMN, strict=True):
        torch.mm(a_TM[rows].mT, b_TN[rows], out=y_MN)
    return y_GMN


PRODUCTS = operators("loops", _by_rows, _of_groups)
