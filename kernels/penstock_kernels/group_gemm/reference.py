"""Definition of group_gemm. The reference of every other implementation."""

import torch


def group_gemm(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> torch.Tensor:
    """Multiply each group's rows by its own matrix: y[t] = weight[g] @ x[t], [T, N].

    Args:
        x_TK: rows sorted by group: the first counts_G[0] belong to group 0, and so on. Rows past
            the last group's are never read, give rows of zeros and get a gradient of zeros.
        weight_GNK: a matrix for each group, in any memory layout: a parameter kept as [G, K, N] is
            passed as parameter.mT.
        counts_G: rows of each group, int32 or int64; together at most T.

    Every group's matrix gets a gradient, of zeros where the group has no rows.
    """
    *starts, total = [0, *counts_G.cumsum(0).tolist()]
    pieces = [
        x_TK[start : start + count] @ matrix_NK.mT
        for start, count, matrix_NK in zip(
            starts, counts_G.tolist(), weight_GNK.unbind(0), strict=True
        )
    ]
    past = x_TK.new_zeros(x_TK.shape[0] - total, weight_GNK.shape[1])
    return torch.cat([*pieces, past])
