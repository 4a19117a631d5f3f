"""Definition of counter-based dropout; slow.

T tokens, F features, G groups of four features.
"""

import torch

from penstock_kernels.rng_rows import WORD, side_by_side, words_of_rows


def keep_mask(
    places_T: torch.Tensor, features: int, rate: float, key: int, first_feature: int = 0
) -> torch.Tensor:
    """Keep mask, [T, F]: whether an element's random word is at least `rate` of the largest word.

    Word f mod 4 of the counter (f div 4, low half of the place, high half of it, 0) is feature f's.
    """
    words = words_of_rows(places_T, key, first_feature, features, 0)
    return side_by_side(words, first_feature, features) >= keep_threshold(rate)


def keep_threshold(rate: float) -> int:
    """The smallest word that is kept. Raises ValueError for a rate that is not in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"the rate is {rate}; it must be at least 0 and less than 1")
    return min(round(rate * 2**32), WORD)


def drop(
    x_TF: torch.Tensor, places_T: torch.Tensor, rate: float, key: int, first_feature: int
) -> torch.Tensor:
    """x / (1 - rate) where it is kept and 0 elsewhere, computed in fp32, in x's dtype.

    Raises:
        ValueError: for places that are not one for each token.
    """
    if x_TF.shape[:-1] != places_T.shape:
        raise ValueError(f"{tuple(places_T.shape)} places for x of {tuple(x_TF.shape)}")
    stays = keep_mask(places_T, x_TF.shape[1], rate, key, first_feature)
    return torch.where(stays, x_TF.float() * (1 / (1 - rate)), 0).to(x_TF.dtype)
