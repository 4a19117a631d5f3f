"""Philox4x32-10: counter-based random words. The reference; on Triton `tl.philox` is the same."""

from collections.abc import Sequence

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
"""The largest number of 32 bits; tensors hold such numbers as int64."""


def philox(counter: Sequence[torch.Tensor], key: int) -> tuple[torch.Tensor, ...]:
    """Four random words of 32 bits for each counter of four words; broadcasts.

    With a key of 64 bits (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
    section 5.1.2).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, key >> 32
    for _ in range(ROUNDS):
        high_0, low_0 = _product(c0, MULTIPLIERS[0])
        high_2, low_2 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def _product(uint32: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product of two words, the second at least 2^31.

    Computed with 2^32 minus the second word, so that the product fits a signed 64-bit integer.
    """
    less = uint32 * (by - 2**32)
    return (less >> 32) + uint32, less & WORD
