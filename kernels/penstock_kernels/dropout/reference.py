"""Definition of counter-based dropout, which is slow; and dropout as a custom operator, whose
backward pass recomputes the mask.

T tokens, F features, G groups of four features.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock_kernels.custom_op import fake_like, keep_inputs, operator
from penstock_kernels.rng_rows import WORD, side_by_side, words_of_rows

Drop = Callable[[torch.Tensor, torch.Tensor, float, int, int], torch.Tensor]
"""x [T, F], places [T], rate, key and first feature to the dropped-out x."""


def keep_mask(
    places_T: torch.Tensor, features: int, rate: float, key: int, first_feature: int = 0
) -> torch.Tensor:
    """Keep mask, [T, F]: whether an element's random word is at least `rate` of the largest word.

    Word f mod 4 of the counter (f div 4, low half of the place, high half of it, 0) is feature f's.
    """
    random_words = words_of_rows(places_T, key, first_feature, features, 0)
    return side_by_side(random_words, first_feature, features) >= keep_threshold(rate)


def keep_threshold(rate: float) -> int:
    """The smallest word that is kept. Raises ValueError for a rate that is not in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"the rate is {rate}; it must be at least 0 and less than 1")
    # A rate close to 1 rounds to 2^32, which no word of 32 bits is.
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
    # Not times the mask: infinity and NaN times 0 are NaN.
    return torch.where(stays, x_TF.float() * (1 / (1 - rate)), 0).to(x_TF.dtype)


def dropping(name: str, drop: Drop) -> Callable[..., torch.Tensor]:
    """Build the operation from the `drop` of the implementation `name`.

    Rate and key are tensors, so compiled code is not recompiled for each step.
    """

    def run(
        x: torch.Tensor,
        positions: torch.Tensor,
        rate: torch.Tensor,
        key: torch.Tensor,
        first_feature: int,
    ) -> torch.Tensor:
        # Rate and key are on the host: reading them waits for no device. The result is contiguous,
        # as that of the fake implementation.
        return drop(x, positions, rate.item(), int(key.item()) % 2**64, first_feature).contiguous()

    def back(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return dropped(dy, *ctx.saved_tensors, *ctx.options), None, None, None, None

    keep = keep_inputs(4, first=1)
    dropped = operator(f"dropout_{name}", run, fake=fake_like(0), keep=keep, backward=back)

    def dropout(
        x_TF: torch.Tensor,
        places_T: torch.Tensor,
        rate: float | torch.Tensor,
        key: int | torch.Tensor,
        first_feature: int = 0,
    ) -> torch.Tensor:
        """`x / (1 - rate)` where it is kept and 0 elsewhere, [T, F].

        `places_T` (int64) identifies each token, and `key` (64 bits) the mask; the same arguments
        always give the same mask. `first_feature` is the index of x's first feature, where x is a
        range of the features of a wider tensor. Only places are saved for the backward pass. In
        compiled code, rate and key are host tensors, as `on_host` makes them.
        """
        if not isinstance(rate, torch.Tensor) or not isinstance(key, torch.Tensor):
            rate, key = on_host(float(rate), int(key))
        return dropped(x_TF, places_T, rate, key, first_feature)

    return dropout


def on_host(rate: float, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rate, float64 [], and a key, its 64 bits as int64 []."""
    signed = key - 2**64 if key >= 2**63 else key
    return (
        torch.tensor(rate, dtype=torch.float64, device="cpu"),
        torch.tensor(signed, dtype=torch.int64, device="cpu"),
    )
