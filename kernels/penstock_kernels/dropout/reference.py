"""Definition of counter-based dropout; slow.

T tokens, F features, G groups of four features.
"""

import torch

from penstock_kernels.philox import WORD, philox


def keep_mask(
    places_T: torch.Tensor, features: int, rate: float, key: int, first_feature: int = 0
) -> torch.Tensor:
    """Keep mask, [T, F]: whether an element's random word is at least `rate` of the largest word.

    Word f mod 4 of the counter (f div 4, low half of the place, high half of it, 0) is feature f's.
    """
    first_group = first_feature // 4
    end_group = -(-(first_feature + features) // 4)
    groups_G = torch.arange(first_group, end_group, device=places_T.device)
    low_T1, high_T1 = places_T[:, None] & WORD, (places_T[:, None] >> 32) & WORD
    random_words = philox((groups_G, low_T1, high_T1, torch.zeros_like(low_T1)), key)
    words_TF = torch.stack(random_words, dim=-1).flatten(1)
    return words_TF.narrow(1, first_feature - 4 * first_group, features) >= keep_threshold(rate)


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
