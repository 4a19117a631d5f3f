"""newton_schulz with the vendor's batched matmuls (baddbmm).

B matrices, N rows, K columns.
"""

import math

import torch

from penstock_kernels.newton_schulz.reference import (
    COEFFICIENTS,
    STEPS,
    require_matrices,
    scaled,
    turned,
)


def newton_schulz(matrix_NK: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """Same as the reference, with fused multiply-adds."""
    require_matrices(matrix_NK, steps)
    a, b, c = COEFFICIENTS
    x = scaled(matrix_NK)
    shape = x.shape
    x_BNK = x.view(math.prod(shape[:-2]), *shape[-2:])
    for _ in range(steps):
        gram = x_BNK @ x_BNK.mT
        of_gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x_BNK = torch.baddbmm(x_BNK, of_gram, x_BNK, beta=a)
    return turned(x_BNK.view(shape), matrix_NK)
