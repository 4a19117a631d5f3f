"""Dropout whose draws depend on what is dropped, and on nothing that has been drawn before.

What is kept of a token at a site is a function of the run's seed, the step, the site's name, the
token and the feature, and how much is kept one of the step and the layer. So neither the layout,
nor the order of micro-batches, nor computing a layer twice changes it, and a run that goes on draws
what it would have drawn.

T tokens, F features.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from penstock.models.layers.module_registry import OpModule, numbered
from penstock_kernels.custom_op import operator
from penstock_kernels.dropout import dropout, on_host

R = TypeVar("R")


@dataclass(frozen=True)
class DropoutRNG:
    """What is drawn from in a forward pass."""

    seed: int
    step: int
    """Of the optimizer, from 0."""
    places_T: torch.Tensor  # noqa: N815 - T names the dimension
    """Which token of the data each of the pass's tokens is, int64."""

    def of(self, which: torch.Tensor | slice) -> "DropoutRNG":
        """The same for some of the tokens, by their numbers here."""
        return replace(self, places_T=self.places_T[which])

    def key(self, site: str) -> int:
        """What the draws of a site depend on besides tokens and features: 64 bits."""
        text = f"{self.seed}:{self.step}:{site}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


_DRAWN_FROM: ContextVar[DropoutRNG | None] = ContextVar("noise", default=None)


@contextmanager
def dropout_rng(noise: DropoutRNG | None) -> Iterator[None]:
    """While this is entered, what is called draws from `noise`, or with None drops nothing."""
    before = _DRAWN_FROM.set(noise)
    try:
        yield
    finally:
        _DRAWN_FROM.reset(before)


def current_noise() -> DropoutRNG | None:
    """What is drawn from here and now."""
    return _DRAWN_FROM.get()


def preserve_dropout_rng(run: Callable[..., R]) -> Callable[..., R]:
    """`run` for a call that is repeated later: it draws from what is drawn from now."""
    noise = current_noise()

    def alike(*args: Any) -> R:
        with dropout_rng(noise):
            return run(*args)

    return alike


@dataclass(frozen=True)
class DropoutRates:
    """How much a model drops."""

    hidden: float = 0.0
    """The rate for what attention and feed-forward networks add to the residual stream."""
    ffn: float = 0.0
    """The rate for what goes into the last matrix of a feed-forward network."""
    attention: float = 0.0
    """The rate for the weights by which attention sums values."""
    warmup_steps: int = 0
    """Steps in which rates rise in a line: none is dropped in the first, and with 0 all rates are
    reached at once."""
    depth: Literal["alike", "rising"] = "alike"
    """Whether layers drop alike, or layer l of L, from 0, l / L of the rate."""

    def site(
        self, of: Literal["hidden", "ffn"], part: str, layer: int, num_layers: int
    ) -> "Dropout":
        """Where a layer, from 0, drops from what its `part` gives."""
        rate = self.hidden if of == "hidden" else self.ffn
        return Dropout(rate, f"model.layers.{layer}.{part}", **self._force(layer, num_layers))

    def of_weights(self, layer: int, num_layers: int) -> "WeightDropout":
        """Where a layer, from 0, drops from attention's weights."""
        site = f"model.layers.{layer}.self_attn.weights"
        return WeightDropout(self.attention, site, **self._force(layer, num_layers))

    def _force(self, layer: int, num_layers: int) -> dict[str, Any]:
        share = layer / num_layers if self.depth == "rising" else 1.0
        return {"share": share, "warmup_steps": self.warmup_steps}


NOTHING = DropoutRates()


class Dropout(OpModule):
    """One place in a model where features are dropped, in training alone.

    Its name is that of what it drops in a checkpoint, so that models cut or fused otherwise draw
    alike. `places_here` is a socket: from the places of the pass's tokens to those of the tokens
    that arrive here; and whoever lets only some features arrive sets `first_feature`.
    """

    def __init__(
        self, rate: float, site: str, *, share: float = 1.0, warmup_steps: int = 0
    ) -> None:
        """A `share` of the rate is in force, once `warmup_steps` are over."""
        super().__init__()
        self.site = site
        self.drops = rate > 0
        """Whether anything is ever dropped at such sites. All that a program may know of the rate,
        which is another one in other layers and steps."""
        self._rate, self._warmup_steps = rate * share, warmup_steps
        self.first_feature = 0
        self.places_here: Callable[[torch.Tensor], torch.Tensor] = _all_of_them

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        """What is left, [T, F], divided by the share that is kept."""
        if not (self.training and self.drops):
            return x_TF
        number = self.known_number()
        if number is not None:
            places_T, rate, key = _draws_of(x_TF.detach(), number)
            return dropout(x_TF, places_T, rate, key, self.first_feature)
        noise = current_noise()
        rate = self.rate_in(noise.step) if noise else 0.0
        if noise is None or not rate:
            return x_TF
        places_T = self.places_here(noise.places_T)
        return dropout(x_TF, places_T, rate, noise.key(self.site), self.first_feature)

    def rate_in(self, step: int) -> float:
        """The rate in this step, from 0."""
        warmup = self._warmup_steps
        return self._rate * step / warmup if step < warmup else self._rate

    def extra_repr(self) -> str:
        """What a printed model says of it."""
        return f"{self._rate}, site={self.site}"


class WeightDropout(Dropout):
    """The same for attention's weights: what is kept depends on the query's token, the head, and
    the key's place in its document. Heads may be some of all, and tokens are not.

    N heads, L tokens of a document.
    """

    def left_of(self, weights_NLL: torch.Tensor, first: int) -> torch.Tensor:
        """What is left of the weights of the document that begins at token `first`, [N, L, L]."""
        noise = current_noise()
        rate = self.rate_in(noise.step) if noise and self.training else 0.0
        if noise is None or not rate:
            return weights_NLL
        heads, length = weights_NLL.shape[:2]
        places_L = noise.places_T[first : first + length]
        # A feature is a head and a key; those of the heads before these ones are elsewhere.
        weights_LF = weights_NLL.transpose(0, 1).flatten(1)
        key, first_feature = noise.key(self.site), self.first_feature * length
        kept_LF = dropout(weights_LF, places_L, rate, key, first_feature)
        return kept_LF.unflatten(1, (heads, length)).transpose(0, 1)


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
    return places_T, *on_host(site.rate_in(noise.step), noise.key(site.site))


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
