"""What dropout by counter means. Slow, obvious, and the judge of every other implementation.

T tokens, F features, G groups of four features.
"""

from collections.abc import Sequence

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
"""The largest number of 32 bits; tensors hold such numbers as int64."""


def philox(counter: Sequence[torch.Tensor], key: int) -> tuple[torch.Tensor, ...]:
    """Four random words of 32 bits for each counter, which is four words itself; broadcast.

    Philox4x32-10 with a key of 64 bits (Salmon et al. 2011, "Parallel random numbers: as easy as
    1, 2, 3", section 5.1.2).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, key >> 32
    for _ in range(ROUNDS):
        high_0, low_0 = _product(c0, MULTIPLIERS[0])
        high_2, low_2 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def kept(
    places_T: torch.Tensor, features: int, rate: float, key: int, first_feature: int = 0
) -> torch.Tensor:
    """Whether each element stays, [T, F]: whether its word is at least `rate` of the largest.

    Word f mod 4 of the counter (f div 4, low half of the place, high half of it, 0) is feature f's.
    """
    first_group = first_feature // 4
    end_group = -(-(first_feature + features) // 4)
    groups_G = torch.arange(first_group, end_group, device=places_T.device)
    low_T1, high_T1 = places_T[:, None] & WORD, (places_T[:, None] >> 32) & WORD
    words = philox((groups_G, low_T1, high_T1, torch.zeros_like(low_T1)), key)
    words_TF = torch.stack(words, dim=-1).flatten(1)
    return words_TF.narrow(1, first_feature - 4 * first_group, features) >= threshold(rate)


def threshold(rate: float) -> int:
    """The least word that is kept. Raises ValueError for a rate that is not in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"the rate is {rate}; it must be at least 0 and less than 1")
    return min(round(rate * 2**32), WORD)


def drop(
    x_TF: torch.Tensor, places_T: torch.Tensor, rate: float, key: int, first_feature: int
) -> torch.Tensor:
    """`x / (1 - rate)` where it is kept and 0 elsewhere, computed in fp32, in x's dtype.

    Raises:
        ValueError: for places that are not one for each token.
    """
    if x_TF.shape[:-1] != places_T.shape:
        raise ValueError(f"{tuple(places_T.shape)} places for x of {tuple(x_TF.shape)}")
    stays = kept(places_T, x_TF.shape[1], rate, key, first_feature)
    return torch.where(stays, x_TF.float() * (1 / (1 - rate)), 0).to(x_TF.dtype)


def _product(word: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product of two; no step of it leaves 63 bits."""
    above, below = word * (by >> 16), word * (by & 0xFFFF)
    low = (((above & 0xFFFF) << 16) + below) & WORD
    return (above + (below >> 16)) >> 16, low
