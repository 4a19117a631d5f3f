"""Mixture of experts (MoE).

T tokens, of which N are of text and M of images; D model width, L width of the experts' inputs and
outputs (that of the model, unless they are latent), K experts per token.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.layers.call_hook import CallHook, call, no_op
from penstock.models.layers.dispatch_memo import recall
from penstock.models.layers.experts import ExpertOperations, Experts, Routing, build_experts
from penstock.models.layers.feed_forward import build_feed_forward
from penstock.models.layers.layer_ops import LayerOps
from penstock.models.layers.router import Precision, Router
from penstock.models.layers.router_observer import current_modalities
from penstock_kernels.permute import sort_by_expert

Projection = Callable[[torch.Tensor], torch.Tensor]


class TokenDispatcher(Protocol):
    """Dispatches tokens to their experts and combines the outputs: the weighted sum of each token's
    experts, [T, L].

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
    """Dispatch where all experts are local."""
    order = recall(lambda: sort_by_expert(choice_TK, experts.num_experts))
    return experts(x_TD, Routing(order, weights_TK, experts.row_indices(order)))


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
        shared_ops: LayerOps,
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.gate = Router(experts, width, precision=router)
        self.experts = build_experts(config, experts, operations)
        self.names, self.scales_inputs = experts.names, experts.scales_inputs
        if inner := experts.shared_intermediate_size:
            self.add_module(self.names.shared, build_feed_forward(config, inner, shared_ops))
        if experts.shared_gate:
            self.add_module(self.names.shared_gate, nn.Linear(width, 1, bias=False))
        if latent := experts.latent_size:
            bias = config.mlp_bias
            self.add_module(self.names.latent_in, nn.Linear(width, latent, bias=bias))
            self.add_module(self.names.latent_out, nn.Linear(latent, width, bias=bias))
        self.dispatch: TokenDispatcher = dispatch_locally
        self.finish_dispatch: Callable[[torch.Tensor], torch.Tensor] = no_op
        self.run_shared: CallHook = call

    @property
    def shared(self) -> nn.Module | None:
        # The MLP of the shared experts. Its name is that in checkpoints, from which adapters take
        # theirs.
        return self._modules.get(self.names.shared)

    @property
    def shared_gate(self) -> nn.Module | None:
        return self._modules.get(self.names.shared_gate)

    @property
    def latent_projections(self) -> tuple[Projection, Projection]:
        names = self.names
        projections = (self._modules.get(name) for name in (names.latent_in, names.latent_out))
        first, last = (no_op if projection is None else projection for projection in projections)
        return first, last

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]."""
        choice_TK, weights_TK = self.gate(x_TD)
        routed_TD = x_TD
        if self.scales_inputs:
            routed_TD = x_TD * weights_TK.to(x_TD.dtype)  # K is 1
            # The combine of the dispatcher multiplies outputs by these.
            weights_TK = torch.ones_like(weights_TK)
        project, project_back = self.latent_projections
        y_TL = self.dispatch(project(routed_TD), choice_TK, weights_TK, self.experts)
        shared, gate = self.shared, self.shared_gate
        if shared is None:
            return project_back(self.finish_dispatch(y_TL))
        shared_TD = self.run_shared(shared, x_TD)
        if gate is not None:
            shared_TD = gate(x_TD).sigmoid() * shared_TD
        return project_back(self.finish_dispatch(y_TL)) + shared_TD


class ModalityMoE(MoE):
    """A `MoE` for the tokens of text, with a second one, `image`, for those of images, as in
    ERNIE-4.5-VL; the shared experts are those of all tokens.

    Both are called in every pass of a model with images, even without a token: under expert and
    data parallelism all ranks must then communicate equally often.
    """

    def __init__(
        self, config: DecoderConfig, experts: ExpertsConfig, of_images: ExpertsConfig, **kwargs: Any
    ) -> None:
        super().__init__(config, experts, **kwargs)
        self.image = MoE(config, of_images, **kwargs)
        # Load balancing is of the experts of text alone.
        self.image.gate.is_observed = False

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        tokens = current_modalities()
        if tokens is None:
            return super().forward(x_TD)
        choice_TK, weights_TK = self.gate(x_TD)
        text_ND, choice_NK, weights_NK = (
            tensor.index_select(0, tokens.text) for tensor in (x_TD, choice_TK, weights_TK)
        )
        text_ND = self.finish_dispatch(self.dispatch(text_ND, choice_NK, weights_NK, self.experts))
        image_MD = self.image(x_TD.index_select(0, tokens.images))
        # Every token is of text or of an image, so no row stays undefined.
        y_TD = torch.empty_like(x_TD, dtype=text_ND.dtype)
        y_TD = y_TD.index_copy(0, tokens.text, text_ND).index_copy(0, tokens.images, image_MD)
        return y_TD if self.shared is None else y_TD + self.run_shared(self.shared, x_TD)


def build_moe(config: DecoderConfig, experts: ExpertsConfig, **kwargs: Any) -> MoE:
    """The MoE layer that the config defines; `kwargs` as in `MoE`."""
    if of_images := experts.of_images:
        return ModalityMoE(config, experts, of_images, **kwargs)
    return MoE(config, experts, **kwargs)
