"""Which experts each token goes to, and with what weight.

T tokens, D model width, E experts, K experts per token.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.shape import ExpertsConfig
from penstock_kernels.route import route

SELECTION_BIAS = "e_score_correction_bias"

Precision = Literal["fp32", "model"]
"""In which the logits are computed: fp32, or that of the hidden states."""


@dataclass(frozen=True)
class Seen:
    """What a router saw of one micro-batch: sums, which may be added over micro-batches, layers and
    all who compute some of them. In `losses/balance.py` is what they are for."""

    num_tokens: int
    counts_E: torch.Tensor  # noqa: N815 - E names the dimension
    """int64: tokens that chose each expert."""
    probabilities_E: torch.Tensor  # noqa: N815 - E names the dimension
    """Each expert's share of a token's scores, summed over tokens; fp32."""
    squares: torch.Tensor
    """The squared logarithm of the sum of exponentials of a token's logits, summed over tokens;
    fp32 scalar."""

    @property
    def frequencies_E(self) -> torch.Tensor:  # noqa: N802 - E names the dimension
        """How often each expert was chosen per token; fp32, K in all."""
        return self.counts_E.float() / max(1, self.num_tokens)

    @property
    def shares_E(self) -> torch.Tensor:  # noqa: N802 - E names the dimension
        """Each expert's mean share of a token's scores; 1 in all."""
        return self.probabilities_E / max(1, self.num_tokens)

    def detached(self) -> "Seen":
        """The numbers alone."""
        return Seen(
            self.num_tokens,
            self.counts_E,
            self.probabilities_E.detach(),
            self.squares.detach(),
        )


Penalty = Callable[[Seen], torch.Tensor]
"""What is added to the loss for what a router saw: a scalar."""


class Router(nn.Module):
    """One linear layer onto the experts, of which each token takes the best few.

    Everything from the logits on is computed in fp32. The selection bias is a parameter that no
    gradient reaches: whoever balances experts by it writes it.

    `penalty` is a socket. What it says joins the loss in the backward pass, from wherever in the
    model or in a pipeline the router is, and as well where its layer is computed again: no sum of
    losses has to hear of it. Where `watches`, or a penalty is there, `seen` is what the last
    forward pass saw; a layer that is computed again overwrites it with the same, so whoever adds up
    reads it between the two.
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, *, precision: Precision) -> None:
        super().__init__()
        self.config = config
        self.precision = precision
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(config.selection_bias), requires_grad=False)
            if config.selection_bias
            else None
        )
        self.penalty: Penalty | None = None
        self.watches = False
        self.seen: Seen | None = None

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
        if self.penalty is None and not self.watches:
            return choice_TK, weights_TK
        seen = self._seen(logits_TE, choice_TK)
        self.seen = seen.detached()
        if self.penalty is not None:
            weights_TK = _WithPenalty.apply(weights_TK, self.penalty(seen))
        return choice_TK, weights_TK

    def _logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.precision == "model":
            return F.linear(x_TD, self.weight.to(x_TD.dtype)).float()
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.float(), self.weight.float())

    def _seen(self, logits_TE: torch.Tensor, choice_TK: torch.Tensor) -> Seen:
        if self.config.scoring == "softmax":
            shares_TE = logits_TE.softmax(-1)
        else:
            scores_TE = logits_TE.sigmoid()
            shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        return Seen(
            num_tokens=logits_TE.shape[0],
            counts_E=torch.bincount(choice_TK.flatten(), minlength=self.config.num_experts),
            probabilities_E=shares_TE.sum(0),
            squares=logits_TE.logsumexp(-1).square().sum(),
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
