"""Observers of routers: they get routing statistics and may return an auxiliary loss.

An observer belongs to one micro-batch. It is kept in a context variable instead of being passed to
the model, so that a recomputed layer finds the observer of its own micro-batch, even while another
micro-batch is in flight.

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
    """Routing statistics of a micro-batch without padding: sums over the tokens of each row, or
    over the local ones."""

    counts_RE: torch.Tensor  # noqa: N815 - R and E name the dimensions
    """int64: number of tokens routed to each expert."""
    shares_RE: torch.Tensor  # noqa: N815 - R and E name the dimensions
    """Sum of each expert's share of a token's scores (a token's shares sum to 1); fp32."""
    squares_R: torch.Tensor  # noqa: N815 - R names the dimension
    """Sum of the squared logsumexp of a token's logits; fp32."""


@dataclass(frozen=True)
class AuxLossGradient:
    """Gradient of the auxiliary loss with respect to routing statistics."""

    shares_RE: torch.Tensor  # noqa: N815 - R and E name the dimensions
    """With respect to the shares of each row, or [1, E] if all rows have the same; fp32,
    detached."""
    squares: float
    """With respect to the squares of each row."""

    def inner_product(self, stats: RouterStats) -> torch.Tensor:
        """Inner product with the statistics: a scalar with this gradient."""
        return (self.shares_RE * stats.shares_RE).sum() + self.squares * stats.squares_R.sum()


class RouterObserver(Protocol):
    """Observes the routers in the passes of one micro-batch."""

    @property
    def row_T(self) -> torch.Tensor:  # noqa: N802 - T names the dimension
        """Row of each token of the pass, from 1; 0 for padding. int64."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        ...

    @property
    def has_aux_loss(self) -> bool:
        """Whether `observe` returns an auxiliary loss."""
        ...

    def observes_pass(self, router: nn.Module) -> bool:
        """Whether to report the current pass."""
        ...

    def observe(self, router: nn.Module, stats: RouterStats) -> AuxLossGradient | None:
        """Record the statistics; return the gradient of the auxiliary loss, or None without one."""
        ...


_CURRENT_OBSERVER: ContextVar[RouterObserver | None] = ContextVar("router_observer", default=None)


@contextmanager
def observe_routers(observer: RouterObserver | None) -> Iterator[None]:
    """Context manager that sets the current observer; None: no observer."""
    before = _CURRENT_OBSERVER.set(observer)
    try:
        yield
    finally:
        _CURRENT_OBSERVER.reset(before)


def current_observer() -> RouterObserver | None:
    """The current observer, or None."""
    return _CURRENT_OBSERVER.get()


def preserve_observer(run: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `run` so that later calls, such as recomputation, use the observer that is
    current now."""
    observer = current_observer()

    def run_with_observer(*args: Any) -> Result:
        with observe_routers(observer):
            return run(*args)

    return run_with_observer
