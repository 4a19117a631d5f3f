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
    # Most CPUs have no bfloat16 products, and oneDNN emulates them at a tenth of the speed. A
    # product of bfloat16 numbers is exact in float32, so nothing is rounded more often.
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    for _ in range(steps):
        x_BNK = x_BNK.to(dtype)
        gram_BNN = (x_BNK @ x_BNK.mT).bfloat16().to(dtype)
        of_gram_BNN = torch.baddbmm(gram_BNN, gram_BNN, gram_BNN, beta=b, alpha=c)
        x_BNK = torch.baddbmm(x_BNK, of_gram_BNN.bfloat16().to(dtype), x_BNK, beta=a).bfloat16()
    return turned(x_BNK.view(shape), matrix_NK)
