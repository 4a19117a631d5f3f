"""Matrices of many shapes: those of one shape are stacked, tall ones with wide ones."""

from collections.abc import Callable, Sequence

import torch

from penstock_kernels.newton_schulz.reference import is_tall

TOGETHER = 1 << 28
"""Elements at a time, except for a single matrix: about four bfloat16 copies of each are stored."""


def each_by_shape(
    matrices: Sequence[torch.Tensor],
    compute: Callable[[torch.Tensor], torch.Tensor],
    together: int = TOGETHER,
) -> list[torch.Tensor]:
    """`compute` of every matrix [N, K], in order, called with stacks of at most `together`
    elements.

    The result of a matrix must not depend on the others of a stack, and the result of a transposed
    matrix must be transposed, as with `newton_schulz`.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    wide = [matrix.mT if is_tall(matrix) else matrix for matrix in matrices]
    for number, matrix in enumerate(wide):
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(number)
    results = dict[int, torch.Tensor]()
    for (shape, _, _), numbers in alike.items():
        most = max(1, together // max(1, shape.numel()))
        for start in range(0, len(numbers), most):
            some = numbers[start : start + most]
            stacked = compute(torch.stack([wide[number] for number in some]))
            for number, result in zip(some, stacked, strict=True):
                results[number] = result.mT if is_tall(matrices[number]) else result
    return [results[number] for number in range(len(matrices))]
