"""Who looks on while routers choose. Routers say what they see; this is where it goes.

A watch is of one micro-batch, and reaches routers beside the model's arguments: a layer that is
computed again, perhaps when another micro-batch is on its way, finds its own again.

T tokens, R packed rows, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


@dataclass(frozen=True)
class RouterStats:
    """What a router saw of a micro-batch, padding left out: sums over the tokens of each row, or
    over those that arrived here."""

    counts_RE: torch.Tensor  # noqa: N815 - R and E name the dimensions
    """int64: tokens that chose each expert."""
    shares_RE: torch.Tensor  # noqa: N815 - R and E name the dimensions
    """Each expert's share of a token's scores, of which a token has 1 in all; fp32."""
    squares_R: torch.Tensor  # noqa: N815 - R names the dimension
    """The squared logarithm of the sum of exponentials of a token's logits; fp32."""


@dataclass(frozen=True)
class AuxLossGradient:
    """What the loss rises by with what a router saw."""

    shares_RE: torch.Tensor  # noqa: N815 - R and E name the dimensions
    """With the shares of each row, or, as [1, E], of any; fp32, without a gradient."""
    squares: float
    """With the squares of each row."""

    def of(self, seen: RouterStats) -> torch.Tensor:
        """By how much it is higher for them, a scalar."""
        return (self.shares_RE * seen.shares_RE).sum() + self.squares * seen.squares_R.sum()


class RouterObserver(Protocol):
    """Looks on during the passes of one micro-batch."""

    @property
    def row_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        """The row of each of the pass's tokens, from 1; 0 for padding. int64."""
        ...

    @property
    def num_rows(self) -> int:
        """R."""
        ...

    @property
    def has_aux_loss(self) -> bool:
        """Whether `saw` gives something to add to the loss."""
        ...

    def observes_pass(self, router: nn.Module) -> bool:
        """Whether it wants to hear of the pass that is going on."""
        ...

    def observe(self, router: nn.Module, seen: RouterStats) -> AuxLossGradient | None:
        """Take note, and say what the loss rises by, if it does."""
        ...


_WATCHED_BY: ContextVar[RouterObserver | None] = ContextVar("watch", default=None)


@contextmanager
def observe_routers(watch: RouterObserver | None) -> Iterator[None]:
    """While this is entered, routers that are called tell `watch`, or with None nobody."""
    before = _WATCHED_BY.set(watch)
    try:
        yield
    finally:
        _WATCHED_BY.reset(before)


def current_watch() -> RouterObserver | None:
    """Who looks on here and now."""
    return _WATCHED_BY.get()


def preserve_observer(run: Callable[..., Result]) -> Callable[..., Result]:
    """`run` for a call that is repeated later: who looks on now will then."""
    watch = current_watch()

    def alike(*args: Any) -> Result:
        with observe_routers(watch):
            return run(*args)

    return alike
