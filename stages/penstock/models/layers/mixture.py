"""A feed-forward network made of experts, of which each token uses a few.

T tokens, D model width, K experts per token.
"""

from typing import Protocol

import torch
from torch import nn

from penstock.models.layers.experts import ExpertOperations, Experts
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.router import Precision, Router
from penstock.models.shape import DecoderConfig, ExpertsConfig
from penstock_kernels.permute import order_of


class Dispatch(Protocol):
    """Take each token to its experts, and back: the sum of what they make of it, weighted, [T, D].

    `choice_TK` are experts' numbers and `weights_TK` their weights, in fp32.
    """

    def __call__(
        self,
        x_TD: torch.Tensor,
        choice_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Experts,
        /,
    ) -> torch.Tensor: ...


def dispatch_here(
    x_TD: torch.Tensor, choice_TK: torch.Tensor, weights_TK: torch.Tensor, experts: Experts, /
) -> torch.Tensor:
    """All experts are here: sort the tokens by expert, run them, and sort back."""
    operations = experts.operations
    order = order_of(choice_TK, experts.num_experts)
    y_RD = experts(operations.permute(x_TD, order), order.counts)
    return operations.unpermute(y_RD, weights_TK, order)


class MixtureOfExperts(nn.Module):
    """Choose, dispatch, combine, and add what the shared experts say of every token.

    `dispatch` is a socket: whoever assembles the model may wrap or replace it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertsConfig,
        *,
        operations: ExpertOperations,
        router: Precision,
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.gate = Router(experts, width, precision=router)
        self.experts = Experts(experts, width, operations=operations)
        self.shared_experts = (
            FeedForward(width, experts.shared_width, bias=config.mlp_bias)
            if experts.shared_width
            else None
        )
        self.dispatch: Dispatch = dispatch_here

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The network's contribution to the residual stream, [T, D]."""
        choice_TK, weights_TK = self.gate(x_TD)
        y_TD = self.dispatch(x_TD, choice_TK, weights_TK, self.experts)
        return y_TD if self.shared_experts is None else y_TD + self.shared_experts(x_TD)
