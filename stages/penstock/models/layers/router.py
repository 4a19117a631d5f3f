"""MoE router: top-k experts and their weights for each token.

T tokens, R packed rows, D model width, E experts, K experts per token.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.module_registry import OpModule, numbered
from penstock.models.layers.router_observer import RouterObserver, RouterStats, current_watch
from penstock_kernels.custom_op import operator
from penstock_kernels.route import route

Precision = Literal["fp32", "model"]
"""Dtype of the logits matmul: fp32, or that of the hidden states."""


class Router(OpModule):
    """A linear layer onto the experts, then top-k.

    Everything after the logits is computed in fp32. The selection bias is a parameter without a
    gradient; load balancing updates it.

    The current observer (`router_observer.py`) gets statistics of the pass. The auxiliary loss that
    it returns enters the gradient in the backward pass of the router itself. So it works in any
    layer, any pipeline stage and with recomputation, and need not be added to the loss.

    Under sequence parallelism the `rows_here` hook maps the rows of the pass's tokens to those of
    the local tokens.
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, *, precision: Precision) -> None:
        super().__init__()
        self.config = config
        self.precision = precision
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(config.selection_bias), requires_grad=False)
            if config.selection_bias
            else None
        )
        self.rows_here: Callable[[torch.Tensor], torch.Tensor] = _all_of_them

    @property
    def is_exact(self) -> bool:
        """Whether its parameters must stay in fp32 when the others are cast."""
        return self.precision == "fp32" or self.e_score_correction_bias is not None

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert indices, int64 [T, K], and weights, fp32 [T, K], of each token."""
        logits_TE = self._logits(x_TD)
        config, bias = self.config, self.e_score_correction_bias
        choice_TK, weights_TK = route(
            logits_TE,
            config.experts_per_token,
            scoring=config.scoring,
            normalized=config.norm_topk_prob,
            bias_E=None if bias is None else bias.flatten(),
            num_groups=config.num_groups,
            groups_per_token=config.groups_per_token,
            scale=config.scale,
        )
        number = self.traced_op_id()
        if number is not None:
            scores = self._scores(logits_TE)
            return choice_TK, _Told.apply(weights_TK, *scores, choice_TK, number)
        penalty = self._penalty(logits_TE, choice_TK)
        if penalty is not None:
            weights_TK = _WithPenalty.apply(weights_TK, penalty)
        return choice_TK, weights_TK

    def _penalty(self, logits_TE: torch.Tensor, choice_TK: torch.Tensor) -> torch.Tensor | None:
        """Report statistics to the observer; return its auxiliary loss, if any."""
        watch = current_watch()
        if watch is None or not watch.observes_pass(self):
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and watch.has_aux_loss):
            seen = self._seen(watch, *self._scores(logits_TE), choice_TK)
            pull = watch.observe(self, seen)
            return None if pull is None else pull.inner_product(seen)

    def aux_loss_grads(
        self, shares_TE: torch.Tensor, squares_T: torch.Tensor, choice_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a compiled pass: the auxiliary loss's gradients with respect to each token's
        shares and squares; zeros without an observer."""
        watch = current_watch()
        if watch is not None and watch.observes_pass(self):
            pull = watch.observe(self, self._seen(watch, shares_TE, squares_T, choice_TK))
            if pull is not None:
                in_row_RT = self._in_row(watch)
                of_shares_RE = pull.shares_RE.expand(len(in_row_RT), -1)
                with torch.autocast(shares_TE.device.type, enabled=False):
                    return in_row_RT.T @ of_shares_RE, in_row_RT.sum(0) * pull.squares
        return torch.zeros_like(shares_TE), torch.zeros_like(squares_T)

    def _in_row(self, watch: RouterObserver) -> torch.Tensor:
        """Mask of the local tokens of each row, fp32 [R, T]."""
        row_T = self.rows_here(watch.row_T)
        numbers_R = torch.arange(1, watch.num_rows + 1, device=row_T.device)
        return (row_T == numbers_R[:, None]).float()

    def _seen(
        self,
        watch: RouterObserver,
        shares_TE: torch.Tensor,
        squares_T: torch.Tensor,
        choice_TK: torch.Tensor,
    ) -> RouterStats:
        """Sums of the statistics over the tokens of each row."""
        experts, row_T = self.config.num_experts, self.rows_here(watch.row_T)
        # Not `torch.bincount`, which synchronizes with the GPU.
        chosen = (row_T[:, None] * experts + choice_TK).flatten()
        counts = chosen.new_zeros((watch.num_rows + 1) * experts)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        in_row_RT = self._in_row(watch)
        with torch.autocast(shares_TE.device.type, enabled=False):
            return RouterStats(
                counts_RE=counts.view(-1, experts)[1:],
                shares_RE=in_row_RT @ shares_TE,
                squares_R=in_row_RT @ squares_T,
            )

    def _logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self.precision == "fp32" else x_TD.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.weight.to(dtype), bias).float()

    def _scores(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each expert's share of a token's scores, and the squared logsumexp of the token's logits
        (z-loss)."""
        if self.config.scoring == "softmax":
            shares_TE = logits_TE.softmax(-1)
        else:
            scores_TE = logits_TE.sigmoid()
            shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        return shares_TE, logits_TE.logsumexp(-1).square()

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        experts, width = self.weight.shape
        return f"{width} -> {self.config.experts_per_token} of {experts}, {self.config.scoring}"


class _WithPenalty(torch.autograd.Function):
    """Returns the weights unchanged; the backward pass gives the auxiliary loss a gradient of 1, as
    a term of the loss."""

    @staticmethod
    def forward(ctx: Any, weights_TK: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(penalty)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, dweights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (penalty,) = ctx.saved_tensors
        return dweights_TK, torch.ones_like(penalty)


class _Told(torch.autograd.Function):
    """The same for compiled code: returns the weights unchanged; the backward pass adds the
    auxiliary loss's gradients to those of the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_TK: torch.Tensor,
        shares_TE: torch.Tensor,
        squares_T: torch.Tensor,
        choice_TK: torch.Tensor,
        number: torch.Tensor,
    ) -> torch.Tensor:
        weights_TK, *pulls = _told_of(weights_TK, shares_TE, squares_T, choice_TK, number)
        ctx.save_for_backward(*pulls)
        return weights_TK

    @staticmethod
    def backward(ctx: Any, dweights_TK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pull_TE, pull_T = ctx.saved_tensors
        return dweights_TK, pull_TE, pull_T, None, None


def _told(
    weights: torch.Tensor,
    shares: torch.Tensor,
    squares: torch.Tensor,
    choice: torch.Tensor,
    number: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights unchanged, and the gradients from `Router.pulls`. The weights are an output so
    that the forward pass needs the operator: otherwise the compiler moves it into the backward
    pass, where another observer may be current."""
    router = numbered(number)
    assert isinstance(router, Router)
    return weights.clone(), *router.aux_loss_grads(shares, squares, choice)


def _told_fake(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(one) for one in given[:3])


def _all_of_them(row_T: torch.Tensor) -> torch.Tensor:
    return row_T


_told_of = operator("router_told", _told, fake=_told_fake)
