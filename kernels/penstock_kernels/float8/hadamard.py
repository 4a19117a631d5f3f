"""Turning features by a block-diagonal Hadamard matrix, so that none stands out.

A number far larger than its neighbours takes the scale for itself, and they are rounded to nothing.
Turned, a block of features shares its size evenly (as in Ashkboos et al. 2024, "QuaRot"). Turning
both sides of a product changes nothing of it but rounding.

F features, in blocks of B, a power of two.
"""

import torch


def hadamard(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Sylvester's matrix [B, B] of 1 and -1: symmetric, and B times its own inverse."""
    place = torch.arange(size, device=device)
    shared = place[:, None] & place
    odd = torch.zeros_like(shared)
    while size > 1:
        odd ^= shared & 1
        shared = shared >> 1
        size //= 2
    return (1 - 2 * odd).to(dtype)


def turn(x: torch.Tensor, block: int, factor: float) -> torch.Tensor:
    """Each block of the last dimension times the matrix and factor, a power of two.

    A linear map that is its own adjoint.
    """
    matrix = hadamard(block, x.device, x.dtype) * factor
    return (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


def factors(block: int) -> tuple[float, float]:
    """Two powers of two, as near as can be, that with two turns make the identity."""
    bits = block.bit_length() - 1
    return 2.0 ** -(bits // 2), 2.0 ** -(bits - bits // 2)
