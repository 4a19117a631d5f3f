"""Mixture of experts (MoE).

T tokens, D model width, K experts per token.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.layers.call_hook import CallHook, call
from penstock.models.layers.clamped_experts import ClampedExperts
from penstock.models.layers.experts import ExpertOperations, Experts
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.layer_ops import Gate
from penstock.models.layers.router import Precision, Router
from penstock_kernels.glu import swiglu
from penstock_kernels.permute import sort_by_expert


class TokenDispatcher(Protocol):
    """Dispatches tokens to their experts and combines the outputs: the weighted sum of each token's
    experts, [T, D].

    `choice_TK` has expert indices and `weights_TK` their fp32 weights.
    """

    def __call__(
        self,
        x_TD: torch.Tensor,
        choice_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Experts,
        /,
    ) -> torch.Tensor: ...


def dispatch_locally(
    x_TD: torch.Tensor, choice_TK: torch.Tensor, weights_TK: torch.Tensor, experts: Experts, /
) -> torch.Tensor:
    """Dispatch where all experts are local: sort tokens by expert, run the experts, and unsort."""
    operations = experts.operations
    order = sort_by_expert(choice_TK, experts.num_experts)
    y_RD = experts(operations.permute(x_TD, order), order.counts)
    return operations.unpermute(y_RD, weights_TK, order)


def no_op(y_TD: torch.Tensor) -> torch.Tensor:
    """The default of `finish_dispatch`: nothing to wait for."""
    return y_TD


class MoE(nn.Module):
    """Router, dispatch, experts and combine, plus the output of the shared experts.

    The caller that builds the model may wrap or replace the hooks `dispatch`, `finish_dispatch` and
    `run_shared`. `dispatch` may return a tensor whose communication is still running.
    `finish_dispatch` waits for it, after the shared experts were computed.
    """

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertsConfig,
        *,
        operations: ExpertOperations,
        router: Precision,
        gate: Gate = swiglu,
    ) -> None:
        """`gate`: the gated activation of the shared experts."""
        super().__init__()
        width = config.hidden_size
        self.gate = Router(experts, width, precision=router)
        form = ClampedExperts if experts.clamped else Experts
        self.experts = form(experts, width, operations=operations)
        self.names, self.scales_inputs = experts.names, experts.scales_inputs
        if inner := experts.shared_intermediate_size:
            mlp = FeedForward(width, inner, bias=config.mlp_bias, gate=gate)
            self.add_module(self.names.shared, mlp)
        if experts.shared_gate:
            self.add_module(self.names.shared_gate, nn.Linear(width, 1, bias=False))
        self.dispatch: TokenDispatcher = dispatch_locally
        self.finish_dispatch: Callable[[torch.Tensor], torch.Tensor] = no_op
        self.run_shared: CallHook = call

    @property
    def shared(self) -> nn.Module | None:
        """The MLP of the shared experts. Its name is that in checkpoints, from which adapters take
        theirs."""
        return self._modules.get(self.names.shared)

    @property
    def shared_gate(self) -> nn.Module | None:
        """The linear layer whose sigmoid multiplies the output of the shared experts."""
        return self._modules.get(self.names.shared_gate)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]."""
        choice_TK, weights_TK = self.gate(x_TD)
        routed_TD = x_TD
        if self.scales_inputs:
            routed_TD = x_TD * weights_TK.to(x_TD.dtype)  # K is 1
            weights_TK = torch.ones_like(weights_TK)
        y_TD = self.dispatch(routed_TD, choice_TK, weights_TK, self.experts)
        shared, gate = self.shared, self.shared_gate
        if shared is None:
            return self.finish_dispatch(y_TD)
        shared_TD = self.run_shared(shared, x_TD)
        if gate is not None:
            shared_TD = gate(x_TD).sigmoid() * shared_TD
        return self.finish_dispatch(y_TD) + shared_TD
