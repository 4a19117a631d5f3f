"""MoE router: top-k experts and their weights for each token.

T tokens, R packed rows, D model width, E experts, K experts per token.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.call_hook import no_op
from penstock.models.layers.module_registry import OpModule, module_by_id
from penstock.models.layers.router_observer import (
    RouterObserver,
    RouterStats,
    current_modalities,
    current_observer,
)
from penstock_kernels.custom_op import operator
from penstock_kernels.route import route, route_stats, row_mask, score_shares, sum_by_row

Precision = Literal["fp32", "model"]
"""Dtype of the logits matmul: fp32, or that of the hidden states."""


class Router(OpModule):
    """A linear layer onto the experts, then top-k.

    Everything after the logits is computed in fp32. The selection bias is a parameter without a
    gradient; load balancing updates it.

    The current observer (`router_observer.py`) gets statistics of the pass. The auxiliary loss that
    it returns enters the gradient in the backward pass of the router itself. So it works in any
    layer, any pipeline stage and with recomputation, and need not be added to the loss.

    Under sequence parallelism the `local_rows` hook maps the rows of the pass's tokens to those of
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
        self.local_rows: Callable[[torch.Tensor], torch.Tensor] = no_op
        self.is_observed = True

    @property
    def is_exact(self) -> bool:
        # Whether its parameters must stay in fp32 when the others are cast.
        return self.precision == "fp32" or self.e_score_correction_bias is not None

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert indices, int64 [T, K], and weights, fp32 [T, K], of each token."""
        dtype = torch.float32 if self.precision == "fp32" else x_TD.dtype
        router_bias = None if self.bias is None else self.bias.to(dtype)
        # Autocast would compute fp32 logits in 16 bits.
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype), router_bias).float()
        config, bias = self.config, self.e_score_correction_bias
        choice_TK, weights_TK = route(
            logits_TE,
            config.experts_per_token,
            scoring=config.scoring,
            normalized=config.norm_topk_prob,
            norm_eps=config.norm_eps,
            # Checkpoints of ERNIE have it as [1, E].
            bias_E=None if bias is None else bias.flatten(),
            num_groups=config.num_groups,
            groups_per_token=config.groups_per_token,
            group_score=config.group_score,
            scale=config.scale,
        )
        op_id = self.traced_op_id()
        if op_id is not None:
            scores = score_shares(logits_TE, config.scoring), logits_TE.logsumexp(-1).square()
            return choice_TK, _AddAuxLossCompiled.apply(weights_TK, *scores, choice_TK, op_id)
        aux_loss = self._aux_loss(logits_TE, choice_TK)
        if aux_loss is not None:
            weights_TK = AddAuxLoss.apply(weights_TK, aux_loss)
        return choice_TK, weights_TK

    def _aux_loss(self, logits_TE: torch.Tensor, choice_TK: torch.Tensor) -> torch.Tensor | None:
        observer = current_observer()
        if observer is None or not self.is_observed or not observer.observes_pass(self):
            return None
        # Statistics without an auxiliary loss would keep the graph of the logits in memory.
        with torch.set_grad_enabled(torch.is_grad_enabled() and observer.has_aux_loss):
            row_T, num_rows = self._local_rows(observer), observer.num_rows
            with torch.autocast(logits_TE.device.type, enabled=False):
                sums = route_stats(
                    logits_TE, choice_TK, row_T, num_rows, scoring=self.config.scoring
                )
            stats = RouterStats(*sums)
            grad = observer.observe(self, stats)
            return None if grad is None else grad.inner_product(stats)

    def aux_loss_grads(
        self, shares_TE: torch.Tensor, squares_T: torch.Tensor, choice_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The same for a compiled pass: the auxiliary loss's gradients with respect to each token's
        # shares and squares; zeros without an observer.
        observer = current_observer()
        if observer is not None and self.is_observed and observer.observes_pass(self):
            row_T, num_rows = self._local_rows(observer), observer.num_rows
            with torch.autocast(shares_TE.device.type, enabled=False):
                sums = sum_by_row(row_T, num_rows, shares_TE, squares_T, choice_TK)
            grad = observer.observe(self, RouterStats(*sums))
            if grad is not None:
                row_mask_RT = row_mask(row_T, num_rows)
                of_shares_RE = grad.shares_RE.expand(len(row_mask_RT), -1)
                # Autocast would multiply in 16 bits.
                with torch.autocast(shares_TE.device.type, enabled=False):
                    return row_mask_RT.T @ of_shares_RE, row_mask_RT.sum(0) * grad.squares
        return torch.zeros_like(shares_TE), torch.zeros_like(squares_T)

    def _local_rows(self, observer: RouterObserver) -> torch.Tensor:
        # The row of each local token, int64 [T]; 0 for those that this router is not of.
        row_T, tokens = self.local_rows(observer.row_T), current_modalities()
        return row_T if tokens is None else row_T * tokens.is_text_T

    def extra_repr(self) -> str:
        experts, width = self.weight.shape
        return f"{width} -> {self.config.experts_per_token} of {experts}, {self.config.scoring}"


class AddAuxLoss(torch.autograd.Function):
    """Returns the weights unchanged; the backward pass gives the auxiliary loss a gradient of 1, as
    a term of the loss."""

    @staticmethod
    def forward(ctx: Any, weights_TK: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(aux_loss)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, dweights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (aux_loss,) = ctx.saved_tensors
        return dweights_TK, torch.ones_like(aux_loss)


class _AddAuxLossCompiled(torch.autograd.Function):
    """The same for compiled code: returns the weights unchanged; the backward pass adds the
    auxiliary loss's gradients to those of the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_TK: torch.Tensor,
        shares_TE: torch.Tensor,
        squares_T: torch.Tensor,
        choice_TK: torch.Tensor,
        op_id: torch.Tensor,
    ) -> torch.Tensor:
        weights_TK, *grads = _observe_op(weights_TK, shares_TE, squares_T, choice_TK, op_id)
        ctx.save_for_backward(*grads)
        return weights_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_TK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pull_TE, pull_T = ctx.saved_tensors
        return dweights_TK, pull_TE, pull_T, None, None


def _observe(
    weights: torch.Tensor,
    shares: torch.Tensor,
    squares: torch.Tensor,
    choice: torch.Tensor,
    op_id: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights unchanged, and the gradients from `Router.aux_loss_grads`."""
    # The weights are an output so that the forward pass needs the operator: otherwise the compiler
    # moves it into the backward pass, where another observer may be current.
    router = module_by_id(op_id)
    assert isinstance(router, Router)
    # An operator returns new memory: its inputs may not be its outputs.
    return weights.clone(), *router.aux_loss_grads(shares, squares, choice)


_observe_op = operator(
    "observe_router", _observe, fake=lambda *args: tuple(map(torch.empty_like, args[:3]))
)
