"""The decoder that every family so far shares: the architecture and nothing else.

T tokens of a flat micro-batch, D model width, V vocabulary, H head width. Parameters carry Hugging
Face's names, so that checkpoints need no renaming (`weights.py` knows the one exception).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import AttentionFn
from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.block import Block
from penstock.models.layers.call_hook import CallHook, call
from penstock.models.layers.dropout import NOTHING, DropoutRates
from penstock.models.layers.experts import ExpertOperations, select_expert_ops
from penstock.models.layers.layer_ops import BEST_OPERATIONS, LayerOps
from penstock.models.layers.moe import MoE
from penstock.models.layers.norm import build_norm
from penstock.models.layers.positions import PositionTable
from penstock.models.layers.rotary import Rotary
from penstock.models.layers.router import Precision, Router
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock_kernels.attention import VarlenMetadata, attention

Reduce = Callable[[torch.Tensor, nn.Module], torch.Tensor]
"""What to make of the final hidden states [T, D] and the head, instead of logits."""

BEST = select_expert_ops("auto")


@dataclass(frozen=True)
class PipelineStageModules:
    """Which of a decoder's modules are here."""

    layers: Sequence[int]
    """The numbers of the layers, in order."""
    begins: bool = True
    """Whether the embedding is."""
    ends: bool = True
    """Whether the last norm and the head are."""

    @staticmethod
    def all_of(config: DecoderConfig) -> "PipelineStageModules":
        """Every module."""
        return PipelineStageModules(range(config.num_hidden_layers))


class DecoderModel(nn.Module):
    """Everything but the head, under the name it has in checkpoints. `Decoder` calls its parts."""

    def __init__(
        self,
        config: DecoderConfig,
        part: PipelineStageModules,
        *,
        merge_qkv: bool,
        attend: AttentionFn,
        operations: LayerOps,
        experts: ExpertOperations,
        router: Precision,
        dropout: DropoutRates,
    ) -> None:
        super().__init__()
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if part.begins else None
        )
        positions = config.learned_positions if part.begins else None
        self.embed_positions = positions and PositionTable(positions, config.hidden_size)
        # By number, so that a layer keeps its name whichever others are here.
        self.layers = nn.ModuleDict(
            {
                str(number): Block(
                    config,
                    number,
                    merge_qkv=merge_qkv,
                    attend=attend,
                    operations=operations,
                    experts=experts,
                    router=router,
                    dropout=dropout,
                )
                for number in part.layers
            }
        )
        self.norm = build_norm(config, operations) if part.ends else None


class Decoder(nn.Module):
    """Token ids in, logits out, or whatever `reduce` makes of the hidden states.

    It may be a part of itself: without the beginning it takes hidden states for token ids, and
    without the end it gives hidden states.

    With tied embeddings `lm_head.weight` is the embedding's own Parameter: `named_parameters` and
    `state_dict` list it once, as the embedding's, and it stays one through `to` and `to_empty`.
    Can be built under `torch.device("meta")`: nothing but parameters is a tensor.
    `run_layer` is a socket, as are `run_attn` and `run_mlp` of each layer.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        merge_qkv: bool = False,
        attention: AttentionFn = attention,
        experts: ExpertOperations = BEST,
        operations: LayerOps = BEST_OPERATIONS,
        router: Precision = "fp32",
        dropout: DropoutRates = NOTHING,
        part: PipelineStageModules | None = None,
    ) -> None:
        super().__init__()
        part = part or PipelineStageModules.all_of(config)
        self.config = config
        self.merge_qkv = merge_qkv
        self.model = DecoderModel(
            config,
            part,
            merge_qkv=merge_qkv,
            attend=attention,
            operations=operations,
            experts=experts,
            router=router,
            dropout=dropout,
        )
        self.lm_head = (
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) if part.ends else None
        )
        self.rotary = Rotary(
            config.rope_parameters,
            head_dim=config.head_dim,
            pairs=config.rope_pairs,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.run_layer: CallHook = call
        self.is_tied = config.tie_word_embeddings and part.begins and part.ends
        if self.is_tied:
            self.tie_weights()
            self.register_state_dict_post_hook(_without_head)
            self.register_load_state_dict_pre_hook(_with_head)

    def routers(self) -> dict[int, Router]:
        """The routers of the layers that are here and have experts, by the layer's number."""
        return {
            int(number): layer.mlp.gate
            for number, layer in self.model.layers.items()
            if isinstance(layer, Block) and isinstance(layer.mlp, MoE)
        }

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, for a model whose config ties them."""
        assert self.lm_head is not None
        assert self.model.embed_tokens is not None
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        inputs: torch.Tensor,
        position_ids_T: torch.Tensor,
        segments: VarlenMetadata,
        reduce: Reduce | None = None,
    ) -> torch.Tensor:
        """Logits [T, V], or `reduce(hidden_TD, lm_head)`; hidden states [T, D] without the end.

        `inputs` are token ids [T], or hidden states [T, D] without the beginning.

        `reduce` is called in here so that it finds the head's weight whole, whatever wraps the
        model to hold only a part of it between calls.
        """
        x_TD = self._embedded(inputs, position_ids_T)
        cos_TH, sin_TH = self.rotary.angles(position_ids_T, x_TD.dtype, segments)
        for layer in self.model.layers.values():
            x_TD = self.run_layer(layer, x_TD, cos_TH, sin_TH, segments)
        if self.model.norm is None or self.lm_head is None:
            return x_TD
        x_TD = self.model.norm(x_TD)
        return self.lm_head(x_TD) if reduce is None else reduce(x_TD, self.lm_head)

    def _embedded(self, inputs: torch.Tensor, position_ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings, in autocast's dtype where it is on: the residual stream keeps the dtype it
        starts with, and a stream in fp32 would undo what autocast is for."""
        if self.model.embed_tokens is None:
            return inputs
        x_TD = self.model.embed_tokens(inputs)
        if self.model.embed_positions is not None:
            x_TD = x_TD + self.model.embed_positions(position_ids_T)
        return as_autocast(x_TD)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True):
        """Move or convert parameters as usual. Torch gives each module its own new Parameter when
        it leaves the meta device, which would part the two that are one."""
        super()._apply(fn, recurse)
        if self.is_tied:
            self.tie_weights()
        return self


def _without_head(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del module, metadata
    state.pop(prefix + HEAD_WEIGHT, None)


def _with_head(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    del module, rest
    if prefix + EMBEDDING_WEIGHT in state:
        state.setdefault(prefix + HEAD_WEIGHT, state[prefix + EMBEDDING_WEIGHT])
