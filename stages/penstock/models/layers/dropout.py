"""Dropout whose draws depend on what is dropped, and on nothing that has been drawn before.

What is kept of a token at a site is a function of the run's seed, the step, the site's name, the
token and the feature. So neither the layout, nor the order of micro-batches, nor computing a layer
twice changes it, and a run that goes on draws what it would have drawn.

T tokens, F features.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from penstock.models.layers.by_number import Numbered, numbered
from penstock_kernels.dropout import dropout, on_host
from penstock_kernels.operator import operator

R = TypeVar("R")


@dataclass(frozen=True)
class Noise:
    """What is drawn from in a forward pass."""

    seed: int
    step: int
    """Of the optimizer, from 0."""
    places_T: torch.Tensor  # noqa: N815 - T names the dimension
    """Which token of the data each of the pass's tokens is, int64."""

    def of(self, which: torch.Tensor | slice) -> "Noise":
        """The same for some of the tokens, by their numbers here."""
        return replace(self, places_T=self.places_T[which])

    def key(self, site: str) -> int:
        """What the draws of a site depend on besides tokens and features: 64 bits."""
        text = f"{self.seed}:{self.step}:{site}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


_DRAWN_FROM: ContextVar[Noise | None] = ContextVar("noise", default=None)


@contextmanager
def drawing_from(noise: Noise | None) -> Iterator[None]:
    """While this is entered, what is called draws from `noise`, or with None drops nothing."""
    before = _DRAWN_FROM.set(noise)
    try:
        yield
    finally:
        _DRAWN_FROM.reset(before)


def current_noise() -> Noise | None:
    """What is drawn from here and now."""
    return _DRAWN_FROM.get()


def drawing_alike(run: Callable[..., R]) -> Callable[..., R]:
    """`run` for a call that is repeated later: it draws from what is drawn from now."""
    noise = current_noise()

    def alike(*args: Any) -> R:
        with drawing_from(noise):
            return run(*args)

    return alike


class Dropout(Numbered):
    """One place in a model where features are dropped, in training alone.

    Its name is that of what it drops in a checkpoint, so that models cut or fused otherwise draw
    alike. `places_here` is a socket: from the places of the pass's tokens to those of the tokens
    that arrive here; and whoever lets only some features arrive sets `first_feature`.
    """

    def __init__(self, rate: float, site: str) -> None:
        super().__init__()
        self.rate, self.site = rate, site
        self.first_feature = 0
        self.places_here: Callable[[torch.Tensor], torch.Tensor] = _all_of_them

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        """What is left, [T, F], divided by the share that is kept."""
        if not (self.training and self.rate):
            return x_TF
        number = self.known_number()
        if number is not None:
            places_T, rate, key = _draws_of(x_TF.detach(), number)
            return dropout(x_TF, places_T, rate, key, self.first_feature)
        noise = current_noise()
        if noise is None:
            return x_TF
        places_T = self.places_here(noise.places_T)
        return dropout(x_TF, places_T, self.rate, noise.key(self.site), self.first_feature)

    def extra_repr(self) -> str:
        """What a printed model says of it."""
        return f"{self.rate}, site={self.site}"


def _all_of_them(places_T: torch.Tensor) -> torch.Tensor:
    return places_T


def _draws(
    x: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a site draws by here and now: places, rate and key. Where nothing is drawn, a rate of 0
    drops nothing."""
    site, noise = numbered(number), current_noise()
    assert isinstance(site, Dropout)
    if noise is None:
        return x.new_zeros(len(x), dtype=torch.int64), *on_host(0.0, 0)
    # Not the noise's own tensor: a program may write over what it is given.
    places_T = site.places_here(noise.places_T).clone()
    return places_T, *on_host(site.rate, noise.key(site.site))


def _draws_fake(
    x: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del number
    places = x.new_empty(x.shape[0], dtype=torch.int64)
    rate, key = (
        x.new_empty((), dtype=dtype, device="cpu") for dtype in (torch.float64, torch.int64)
    )
    return places, rate, key


_draws_of = operator("dropout_draws", _draws, fake=_draws_fake)
