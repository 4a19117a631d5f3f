"""Multi-token prediction (MTP) as in DeepSeek-V3 (arXiv:2412.19437, section 2.2).

The layer of depth k gets, at position i, the hidden state of depth k - 1 and the embedding of token
i + k, and predicts token i + k + 1 with the model's own embedding and head:

    h'_i = eh_proj [enorm(embedding of t_{i+k}) ; hnorm(h_i of depth k - 1)]
    h_i of depth k = norm(block(h'_i))

Where the report leaves it open, this follows the published inference code: the embedding comes
first, the hidden states of depth 0 are those after the model's final norm (vLLM, Megatron-LM), and
later depths get them after the norm as well (transformers, Megatron-LM). A token is at the position
of its hidden state, i. Embeddings at position 0 are not zeroed, as vLLM does. The embedding of an
image token is the image's feature (vLLM, NeMo AutoModel), without those that decoder layers add.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.block import Block
from penstock.models.layers.norm import build_norm
from penstock_kernels.attention import VarlenMetadata

# pyright: reportIncompatibleMethodOverride=false


class PredictionLayer(Block):
    """The layer of one depth: a block of the model's own kind behind a projection of two inputs."""

    def __init__(self, config: DecoderConfig, layer: int, **kwargs: Any) -> None:
        """`layer` is the index after those of the decoder; `kwargs` is as in `Block`."""
        super().__init__(config, layer, **kwargs)
        width = config.hidden_size
        self.enorm = build_norm(config, kwargs["operations"])
        self.hnorm = build_norm(config, kwargs["operations"])
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.norm = build_norm(config, kwargs["operations"])

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TH: torch.Tensor,
        sin_TH: torch.Tensor,
        segments: VarlenMetadata,
        *embeddings_TD: torch.Tensor,
    ) -> torch.Tensor:
        """The normalized hidden states of this depth, [T, D], from those of the depth before and
        the embeddings of the tokens that these predict."""
        [next_TD] = embeddings_TD
        both_TD = torch.cat([self.enorm(next_TD), self.hnorm(x_TD)], dim=-1)
        return self.norm(super().forward(self.eh_proj(both_TD), cos_TH, sin_TH, segments))


class EmbeddingApart(torch.autograd.Function):
    """Embeddings whose weight gets its gradient in a backward pass of its own, in the graph after
    the hidden states of a pipeline stage.

    A split backward pass (zero bubble) starts the weights' part where they meet what depends on the
    stage's input. PyTorch mixes up weights that meet it in the same places, as the embedding and
    the norms after it would, and passes through layers twice to a weight that meets it in several,
    as one that is tied to the head would.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, embed: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        del hidden_TD
        # Autograd records nothing in a Function's forward by itself, and `backward` needs this
        # graph.
        with torch.enable_grad():
            ctx.embedded_TD = embed()
        return ctx.embedded_TD.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[None, None]:
        # Hidden states get no gradient from here.
        if ctx.embedded_TD.requires_grad:
            ctx.embedded_TD.backward(grad_TD)
        return None, None


@dataclass(frozen=True)
class FurtherTokens:
    """What the layers of depth 1 to K read, and what becomes of their hidden states."""

    input_ids_KT: torch.Tensor  # noqa: N815 - KT names the dimensions
    """At depth k token i + k of position i; any token where its document has none."""
    output_fns: Sequence[Callable[[torch.Tensor, nn.Module], torch.Tensor]]
    """For each depth what `decoder.OutputFn` is for the model: its loss."""
    feature_index_KT: torch.Tensor | None = None  # noqa: N815 - KT names the dimensions
    """At depth k the index of the image feature of token i + k, -1 where it has none; None without
    images."""

    @property
    def indices(self) -> Sequence[torch.Tensor | None]:
        none = [None] * len(self.output_fns)
        return none if self.feature_index_KT is None else [*self.feature_index_KT]

    def with_output(
        self, output_fn: Callable[[torch.Tensor, nn.Module], torch.Tensor]
    ) -> "FurtherTokens":
        """The same with one function for all depths."""
        return replace(self, output_fns=[output_fn] * len(self.output_fns))
