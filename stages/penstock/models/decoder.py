"""The decoder architecture that all families share.

T tokens of a packed micro-batch, D model width, V vocabulary, H head dimension. Parameters have
Hugging Face's names, so checkpoints need no renaming, except for what `weights.py` maps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import AttentionFn
from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.block import Block
from penstock.models.layers.call_hook import CallHook, call
from penstock.models.layers.dropout import NO_DROPOUT, DropoutRates
from penstock.models.layers.experts import ExpertOperations, select_expert_ops
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.moe import MoE
from penstock.models.layers.norm import build_norm
from penstock.models.layers.positions import PositionTable
from penstock.models.layers.rotary import Rotary, query_scale
from penstock.models.layers.router import Precision, Router
from penstock.models.multi_token_prediction import EmbeddingApart, FurtherTokens, PredictionLayer
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.models.vision.tower import ImageFeatures, ImageInputs, VisionTower
from penstock.models.weights import WeightMap
from penstock_kernels.attention import VarlenMetadata, attention

OutputFn = Callable[[torch.Tensor, nn.Module], torch.Tensor]
"""Called with the final hidden states [T, D] and the head; returns what `forward` returns instead
of logits."""

DEFAULT_EXPERT_OPS = select_expert_ops("auto")


@dataclass(frozen=True)
class PipelineStageModules:
    """The modules of a decoder that are in this pipeline stage."""

    layers: Sequence[int]
    """Layer indices, in order."""
    has_embedding: bool = True
    """Whether it is the first, which gets token ids: the embedding is included."""
    has_head: bool = True
    """Whether it is the last: the final norm and the head are included, and the embedding if
    layers predict further tokens."""

    @staticmethod
    def all_of(config: DecoderConfig) -> "PipelineStageModules":
        return PipelineStageModules(range(config.num_layers))


class DecoderModel(nn.Module):
    """Everything except the head, named as in checkpoints. `Decoder` calls its submodules."""

    def __init__(self, config: DecoderConfig, part: PipelineStageModules, **kwargs: Any) -> None:
        """`kwargs` is as in `Block`."""
        super().__init__()
        has_table = part.has_embedding or (part.has_head and config.num_mtp_layers > 0)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if has_table else None
        )
        positions = config.learned_positions if part.has_embedding else None
        self.embed_positions = positions and PositionTable(positions, config.hidden_size)
        # A dict by layer index, so that layer names are the same in every pipeline stage.
        self.layers = nn.ModuleDict(
            {
                str(number): (Block if number < config.num_hidden_layers else PredictionLayer)(
                    config, number, **kwargs
                )
                for number in part.layers
            }
        )
        self.norm = build_norm(config, kwargs["operations"]) if part.has_head else None


class Decoder(nn.Module):
    """Maps token ids to logits, or to what `output_fn` returns.

    It may be one pipeline stage: without the embedding it takes hidden states instead of token ids,
    and without the head it returns hidden states.

    With tied embeddings `lm_head.weight` is the embedding's Parameter: `named_parameters` and
    `state_dict` list it once, as the embedding, and it stays tied through `to` and `to_empty`. Can
    be built under `torch.device("meta")`, because the only tensors are parameters. `run_layer`, and
    `run_attn` and `run_mlp` of each layer, are call hooks.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        merge_qkv: bool = False,
        attention: AttentionFn = attention,
        experts: ExpertOperations = DEFAULT_EXPERT_OPS,
        operations: LayerOps = DEFAULT_LAYER_OPS,
        router: Precision = "fp32",
        dropout: DropoutRates = NO_DROPOUT,
        part: PipelineStageModules | None = None,
        vision: VisionTower | None = None,
        rope_axes: Sequence[int] | None = None,
    ) -> None:
        """`vision` computes the features of images. With `rope_axes` positions may be [T, 3], and
        each pair of rotated features has the axis that is named for it."""
        super().__init__()
        part = part or PipelineStageModules.all_of(config)
        self.config = config
        # First, as it is called first: FSDP gathers weights ahead in the order of the modules.
        self.vision = vision
        self.merge_qkv = merge_qkv
        self.feature_scale = 1.0 if config.rounds_embedding_scale else config.embedding_scale
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
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) if part.has_head else None
        )
        self.rotary, *sliding = (
            Rotary(
                parameters,
                head_dim=head_dim,
                pairs=config.rope_pairs,
                fp32=config.rope_fp32,
                max_position_embeddings=config.max_position_embeddings,
                axes=rope_axes,
            )
            for parameters, head_dim in zip(
                config.all_rope_parameters, config.rope_head_dims, strict=False
            )
        )
        self.sliding_rotary = sliding[0] if sliding else None
        self.run_layer: CallHook = call
        self.takes_ids = part.has_embedding
        has_both = self.model.embed_tokens is not None and self.lm_head is not None
        self.is_tied = config.tie_word_embeddings and has_both
        if self.is_tied:
            self.tie_weights()
            self.register_state_dict_post_hook(_drop_tied_head)
            self.register_load_state_dict_pre_hook(_add_tied_head)

    @cached_property
    def weight_map(self) -> WeightMap:
        if self.vision is None:
            return WeightMap(self.config, self.merge_qkv)
        backbone = self.vision.config.backbone
        return WeightMap(self.config, self.merge_qkv, backbone, self.vision.shapes)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of this stage, in order; last those that predict further tokens."""
        return list(self.model.layers.values())

    @property
    def edges(self) -> tuple[nn.Module | None, nn.Module | None, nn.Module | None]:
        """The embedding, the final norm and the head, as far as they are in this stage."""
        return self.model.embed_tokens, self.model.norm, self.lm_head

    def routers(self) -> dict[int, Router]:
        """The routers of this stage's MoE layers, by layer index."""
        return {
            int(number): layer.mlp.gate
            for number, layer in self.model.layers.items()
            if isinstance(layer, Block) and isinstance(layer.mlp, MoE)
        }

    def all_routers(self) -> list[Router]:
        """The routers of this stage, with those of the tokens of images."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def fp32_modules(self) -> list[nn.Module]:
        """The modules whose parameters are never cast: routers that compute in fp32."""
        return [router for router in self.all_routers() if router.is_exact]

    def tie_weights(self) -> None:
        assert self.lm_head is not None
        assert self.model.embed_tokens is not None
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        inputs: torch.Tensor,
        position_ids_T: torch.Tensor,
        segments: VarlenMetadata,
        output_fn: OutputFn | None = None,
        further: FurtherTokens | None = None,
        images: ImageInputs | None = None,
    ) -> torch.Tensor:
        """Logits [T, V], or `output_fn(hidden_TD, lm_head)`, to which a soft cap of the logits is
        left; hidden states [T, D] in a stage without the head. With `further` the outputs of the
        layers that predict further tokens are added.

        `inputs` are token ids [T], or hidden states [T, D] in a stage without the embedding.
        The features of `images` replace the embeddings of their tokens.

        `output_fn` is called inside forward, because under FSDP the head's weight is unsharded only
        there.
        """
        config = self.config
        features = None if images is None or self.vision is None else self.vision(images)
        x_TD = self._embed(inputs, position_ids_T) if self.takes_ids else inputs
        if features is not None:
            x_TD = features.replace(x_TD, self.feature_scale)
        angles = sliding_angles = self.rotary.angles(position_ids_T, x_TD.dtype, segments)
        if self.sliding_rotary is not None:
            sliding_angles = self.sliding_rotary.angles(position_ids_T, x_TD.dtype, segments)
        scales: tuple[torch.Tensor, ...] = ()
        if config.query_scale is not None:
            scales = (query_scale(config.query_scale, position_ids_T, x_TD.dtype),)
        chunks = segments
        if config.chunked_layers and config.attention_chunk is not None:
            chunks = segments.in_chunks(config.attention_chunk)
        for number, layer in self.model.layers.items():
            index = int(number)
            if index >= config.num_hidden_layers:
                break
            cos_TH, sin_TH = sliding_angles if index in config.sliding_layers else angles
            within = chunks if index in config.chunked_layers else segments
            own = scales if config.scales_queries(index) else ()
            x_TD = self.run_layer(layer, x_TD, cos_TH, sin_TH, within, *own)
            if features is not None:
                x_TD = features.add(x_TD, index)
        if self.model.norm is None or self.lm_head is None:
            return x_TD
        x_TD = self.model.norm(x_TD)
        if output_fn is not None:
            output = output_fn(self._scaled(x_TD), self.lm_head)
            if further is not None:
                output = output + self._predict(
                    further, x_TD, position_ids_T, angles, segments, features
                )
            return output
        logits_TV, cap = self.lm_head(self._scaled(x_TD)), config.logit_soft_cap
        return logits_TV if cap is None else (logits_TV / cap).tanh() * cap

    def _predict(
        self,
        further: FurtherTokens,
        hidden_TD: torch.Tensor,
        position_ids_T: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        segments: VarlenMetadata,
        features: ImageFeatures | None,
    ) -> torch.Tensor:
        """The summed outputs of the layers that predict further tokens, from the normalized hidden
        states of the layers before."""
        assert self.lm_head is not None
        x_TD, loss = hidden_TD, hidden_TD.new_zeros((), dtype=torch.float32)
        layers = self.blocks[-len(further.output_fns) :]
        for layer, ids_T, index_T, output_fn in zip(
            layers, further.input_ids_KT, further.indices, further.output_fns, strict=True
        ):
            embed = partial(self._embed, ids_T, position_ids_T)
            is_apart = not self.takes_ids and torch.is_grad_enabled()
            next_TD = EmbeddingApart.apply(hidden_TD, embed) if is_apart else embed()
            if features is not None and index_T is not None:
                next_TD = features.at_tokens(index_T).replace(next_TD, self.feature_scale)
            x_TD = self.run_layer(layer, x_TD, *angles, segments, next_TD)
            loss = loss + output_fn(self._scaled(x_TD), self.lm_head)
        return loss

    def _scaled(self, x_TD: torch.Tensor) -> torch.Tensor:
        # Hidden states times the factor of the logits: the head is linear, so this scales them, and
        # every loss of them.
        scale = self.config.logit_scale
        return x_TD if scale == 1 else x_TD * scale

    def _embed(self, ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> torch.Tensor:
        # Embeddings, cast to the autocast dtype if autocast is enabled: the residual stream keeps
        # the dtype of the embeddings, and fp32 would undo the effect of autocast.
        assert self.model.embed_tokens is not None
        x_TD = self.model.embed_tokens(ids_T)
        if (scale := self.config.embedding_scale) != 1:
            rounds = self.config.rounds_embedding_scale
            # A tensor is rounded to the embeddings' dtype, as Gemma's factor is; a number is not.
            x_TD = x_TD * (x_TD.new_full((), scale) if rounds else scale)
        if self.model.embed_positions is not None:
            x_TD = x_TD + self.model.embed_positions(position_ids_T)
        return as_autocast(x_TD)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True):
        # Move or convert parameters, then tie them again: when a model leaves the meta device,
        # torch creates a new Parameter for each module.
        super()._apply(fn, recurse)
        if self.is_tied:
            self.tie_weights()
        return self


# named_parameters lists a shared Parameter once, state_dict under both of its names.
def _drop_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del module, metadata
    state.pop(prefix + HEAD_WEIGHT, None)


# Strict loading would report the head as missing.
def _add_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    del module, args
    if prefix + EMBEDDING_WEIGHT in state:
        state.setdefault(prefix + HEAD_WEIGHT, state[prefix + EMBEDDING_WEIGHT])
