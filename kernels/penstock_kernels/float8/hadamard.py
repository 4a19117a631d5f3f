"""Block-diagonal Hadamard transform of features, which spreads outliers.

An outlier determines the scale, and other values are rounded to zero. The transform distributes
its magnitude over a block of features (as in Ashkboos et al. 2024, "QuaRot"). Applied to both
operands of a matmul, it changes nothing but rounding.

F features, in blocks of B, a power of two.
"""

import torch


def hadamard(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Sylvester's matrix [B, B] of 1 and -1: symmetric, and B times its own inverse."""
    index = torch.arange(size, device=device)
    shared = index[:, None] & index
    odd = torch.zeros_like(shared)
    while size > 1:
        # The sign is the parity of the bits that the indices of row and column share.
        odd ^= shared & 1
        shared = shared >> 1
        size //= 2
    return (1 - 2 * odd).to(dtype)


def turn(x: torch.Tensor, block: int, factor: float) -> torch.Tensor:
    """Multiply each block of the last dimension by the Hadamard matrix and `factor`, a power of
    two.

    A linear map that is its own adjoint.
    """
    matrix = hadamard(block, x.device, x.dtype) * factor
    return (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


def factors(block: int) -> tuple[float, float]:
    """Two powers of two, as equal as possible, with which two transforms are the identity."""
    # Not 1 / sqrt(B) twice: for an odd power of two it is no power of two, and scaling would round.
    bits = block.bit_length() - 1
    return 2.0 ** -(bits // 2), 2.0 ** -(bits - bits // 2)
