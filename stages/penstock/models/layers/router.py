"""Which experts each token goes to, and with what weight.

T tokens, R packed rows, D model width, E experts, K experts per token.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.layers.watch import Seen, current_watch
from penstock.models.shape import ExpertsConfig
from penstock_kernels.route import route

SELECTION_BIAS = "e_score_correction_bias"

Precision = Literal["fp32", "model"]
"""In which the logits are computed: fp32, or that of the hidden states."""


class Router(nn.Module):
    """One linear layer onto the experts, of which each token takes the best few.

    Everything from the logits on is computed in fp32. The selection bias is a parameter that no
    gradient reaches: whoever balances experts by it writes it.

    Whoever watches the pass (`watch.py`) hears what it saw, and what they give for it joins the
    loss in the backward pass, from wherever in the model or in a pipeline the router is, and as
    well where its layer is computed again: no sum of losses has to hear of it.

    `rows_here` is a socket: from the rows of the pass's tokens to those of the tokens that arrive.
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
        """Whether its parameters must keep fp32 where others are cast for computing."""
        return self.precision == "fp32" or self.e_score_correction_bias is not None

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of each token's experts, int64 [T, K], and their weights, fp32 [T, K]."""
        logits_TE = self._logits(x_TD)
        config, bias = self.config, self.e_score_correction_bias
        choice_TK, weights_TK = route(
            logits_TE,
            config.experts_per_token,
            scoring=config.scoring,
            normalised=config.normalised,
            bias_E=None if bias is None else bias.flatten(),
            num_groups=config.num_groups,
            groups_per_token=config.groups_per_token,
            scale=config.scale,
        )
        watch = current_watch()
        if watch is None or not watch.looks_at(self):
            return choice_TK, weights_TK
        with torch.set_grad_enabled(torch.is_grad_enabled() and watch.penalises):
            seen = self._seen(logits_TE, choice_TK, self.rows_here(watch.row_T), watch.num_rows)
            penalty = watch.saw(self, seen)
        if penalty is not None:
            weights_TK = _WithPenalty.apply(weights_TK, penalty)
        return choice_TK, weights_TK

    def _logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self.precision == "fp32" else x_TD.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.weight.to(dtype), bias).float()

    def _seen(
        self,
        logits_TE: torch.Tensor,
        choice_TK: torch.Tensor,
        row_T: torch.Tensor,
        num_rows: int,
    ) -> Seen:
        experts = self.config.num_experts
        if self.config.scoring == "softmax":
            shares_TE = logits_TE.softmax(-1)
        else:
            scores_TE = logits_TE.sigmoid()
            shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        # Not `bincount`, for which a GPU would wait.
        chosen = (row_T[:, None] * experts + choice_TK).flatten()
        counts = chosen.new_zeros((num_rows + 1) * experts)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        numbers_R = torch.arange(1, num_rows + 1, device=row_T.device)
        in_row_RT = (row_T == numbers_R[:, None]).float()
        with torch.autocast(logits_TE.device.type, enabled=False):
            return Seen(
                counts_RE=counts.view(-1, experts)[1:],
                shares_RE=in_row_RT @ shares_TE,
                squares_R=in_row_RT @ logits_TE.logsumexp(-1).square(),
            )

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        experts, width = self.weight.shape
        return f"{width} -> {self.config.experts_per_token} of {experts}, {self.config.scoring}"


class _WithPenalty(torch.autograd.Function):
    """Weights as they are; in the backward pass the penalty, as a summand of the loss, gets its
    gradient of 1."""

    @staticmethod
    def forward(ctx: Any, weights_TK: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(penalty)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, dweights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (penalty,) = ctx.saved_tensors
        return dweights_TK, torch.ones_like(penalty)


def _all_of_them(row_T: torch.Tensor) -> torch.Tensor:
    return row_T
