"""Observers of routers: they get routing statistics and may return an auxiliary loss.

An observer belongs to one micro-batch.

T tokens, R packed rows, E experts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from penstock.models.layers.pass_state import PassState


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


_OBSERVER = PassState[RouterObserver]("router_observer")
observe_routers = _OBSERVER.use
"""Context manager that sets the current observer; None: no observer."""
current_observer = _OBSERVER.get
preserve_observer = _OBSERVER.preserve


@dataclass(frozen=True)
class ModalityTokens:
    """The tokens of each modality among those that a MoE layer computes on this rank, by which it
    chooses a router."""

    is_text_T: torch.Tensor  # noqa: N815 - T names the dimension
    """int64: 1, or 0 for a token of an image."""
    text: torch.Tensor
    """The places of the tokens of text, int64."""
    images: torch.Tensor
    """The places of the tokens of images."""


_MODALITIES = PassState[ModalityTokens]("modality_tokens")
route_modalities = _MODALITIES.use
"""Context manager that sets the tokens of the pass; None: all are text, and the routers and experts
of images are not called."""
current_modalities = _MODALITIES.get
preserve_modalities = _MODALITIES.preserve
