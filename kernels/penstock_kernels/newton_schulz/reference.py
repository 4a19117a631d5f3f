"""Definition of Muon's Newton-Schulz iteration, which is slow, and its implementation by PyTorch.

N rows, K columns of a matrix, or a stack of such matrices with leading dimensions, B of them.
"""

import math
from collections.abc import Callable, Sequence

import torch

# Jordan et al. chose them for the steepest slope at 0, at which small singular values grow
# fastest, and not for convergence to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5: singular values end between about 0.7 and 1.2."""
STEPS = 5
EPS = 1e-7
"""Minimum norm in the division."""

# Elements at a time, except for a single matrix: about four bfloat16 copies of each are stored.
TOGETHER = 1 << 28


def newton_schulz(matrix_NK: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """A matrix with the same singular vectors and singular values near 1, in bfloat16.

    `X <- a X + (b A + c A A) X` with `A = X X'`, repeated, from the matrix divided by its
    Frobenius norm (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks").
    A singular value s becomes `a s + b s^3 + c s^5` each time. Everything is in bfloat16, with
    matmuls accumulated in float32. A matrix with more rows than columns is transposed meanwhile.

    Matrices [..., N, K] are processed separately.

    Raises:
        ValueError: it has no rows and columns, or steps are negative.
    """
    require_matrices(matrix_NK, steps)
    a, b, c = COEFFICIENTS
    x = scaled(matrix_NK)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return turned(x, matrix_NK)


def batched(matrix_NK: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """Same, by the vendor's batched matmuls with fused multiply-adds (baddbmm)."""
    require_matrices(matrix_NK, steps)
    a, b, c = COEFFICIENTS
    x = scaled(matrix_NK)
    shape = x.shape
    x_BNK = x.view(math.prod(shape[:-2]), *shape[-2:])
    # Most CPUs have no bfloat16 products, and oneDNN emulates them at a tenth of the speed. A
    # product of bfloat16 numbers is exact in float32, so nothing is rounded more often.
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    for _ in range(steps):
        x_BNK = x_BNK.to(dtype)
        gram_BNN = (x_BNK @ x_BNK.mT).bfloat16().to(dtype)
        of_gram_BNN = torch.baddbmm(gram_BNN, gram_BNN, gram_BNN, beta=b, alpha=c)
        x_BNK = torch.baddbmm(x_BNK, of_gram_BNN.bfloat16().to(dtype), x_BNK, beta=a).bfloat16()
    return turned(x_BNK.view(shape), matrix_NK)


def require_matrices(matrix_NK: torch.Tensor, steps: int) -> None:
    """Refuse tensors that are no matrices, and invalid numbers of steps."""
    if matrix_NK.ndim < 2:
        raise ValueError(f"{tuple(matrix_NK.shape)} is no matrix; it must have rows and columns")
    if steps < 0:
        raise ValueError(f"{steps} steps are less than none")


def scaled(matrix_NK: torch.Tensor) -> torch.Tensor:
    """Each matrix divided by its norm, in bfloat16, transposed if it is tall."""
    x = matrix_NK.bfloat16()
    # Of a wide matrix X X' is the smaller Gram matrix; transposing keeps the singular values.
    x = x.mT if is_tall(x) else x
    # The Frobenius norm is at least the largest singular value, so all are at most 1.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    # A tall matrix is a transposed view here, and kernels read rows without gaps.
    return (x / norm.clamp(min=EPS)).contiguous()


def turned(x: torch.Tensor, like_NK: torch.Tensor) -> torch.Tensor:
    """`x`, transposed back if the original matrix is tall."""
    return x.mT if is_tall(like_NK) else x


def is_tall(matrix_NK: torch.Tensor) -> bool:
    """Whether it has more rows than columns."""
    return matrix_NK.shape[-2] > matrix_NK.shape[-1]


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
