"""Tensor sharding: which boxes of checkpoint tensors each tensor-parallel rank holds, before FSDP.

A family's tables give the roles of modules and the units of their features; this file computes what
that means for one rank. Column-parallel layers are split by rows of the weight, row-parallel layers
by columns, embedding and head by vocabulary entries.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from penstock.adapters.names import LoraParamName, native_name, parse_lora_name
from penstock.core.errors import CapabilityError
from penstock.engine.distributed.collectives import Residual
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.param_shards import GradReduceAxis, TensorShard, full_shard
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.layers.block import PART_NAMES
from penstock.models.layers.quantized_linear import QuantizedMatrix
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.models.tp_roles import (
    DECODER_ROLES,
    ParallelStyle,
    Roles,
    ShardUnit,
    find_parallel_style,
    shard_unit,
)
from penstock.models.vision.types import VISION
from penstock.models.weights import LAYERS, WeightMap
from penstock_kernels.quant import Format


def shard_range(count: int, size: int, index: int) -> range:
    """The range of `count` items in shard `index` of `size`; sizes differ by one at most."""
    return range(index * count // size, (index + 1) * count // size)


@dataclass(frozen=True)
class Span:
    """The features of a layer that one rank computes."""

    first: int
    count: int
    copies: int = 1
    """The number of tensor-parallel ranks with the same features."""


@dataclass(frozen=True)
class TensorParallelPlan:
    """How one rank holds a model, or a part of one."""

    names: WeightMap
    roles: Roles
    size: int
    index: int
    residual: Residual
    expert_size: int = 1
    expert_index: int = 0
    formats: Mapping[str, Format] = field(default_factory=dict[str, Format])
    """The formats of quantized parameters, by their unquantized names."""
    copied: frozenset[str] = frozenset()
    """Parameters of which the first and the last part have a copy each: an embedding, and the head
    that is tied to it."""

    def shards(self, name: str, shape: tuple[int, ...]) -> tuple[TensorShard, ...]:
        """The shards of parameter `name`; empty if this rank has no such parameter.

        `shape` is only read for dimensions of LoRA factors that are never split: the full shape of
        a factor that experts share, otherwise the LoRA rank.
        """
        if factor := parse_lora_name(name):
            if factor.is_expert:
                return (self._expert_lora_shard(factor, shape),)
            return tuple(self._lora_shards(factor, shape))
        module, _, leaf = name.rpartition(".")
        if module in self.formats:
            return tuple(
                _quantized_shard(shard, leaf, self.formats[module])
                for shard in self.shards(module, shape)
            )
        if name.startswith(VISION):
            # Each rank has the gradients of its share of the images.
            [tensor] = self.names.hf_names(name)
            return (self._replicate(tensor, "tensor"),)
        role = find_parallel_style(module, self.roles)
        if name in self.copied:
            table = self._shard(self.names.config.names.embedding, 0, self.span("embed_tokens"))
            return (replace(table, num_copies=2),)
        if role in (None, ParallelStyle.REPLICATED):
            [tensor] = self.names.hf_names(name)
            # Of the residual stream every rank computes all tokens, or its own (split).
            within = self.residual == "split" or any(p in PART_NAMES for p in module.split("."))
            return (self._replicate(tensor, "tensor" if within else None),)
        if role is ParallelStyle.PER_HEAD:
            [tensor] = self.names.hf_names(name)
            sizes = self._shapes[tensor]
            # Kimi Linear stores A_log as [1, 1, heads, 1].
            dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
            return (self._shard(tensor, dim, _span(sizes[dim], self.size, self.index)),)
        if role is ParallelStyle.EXPERTS:
            return tuple(self._expert_shards(name))
        if self.is_in_moe(module):
            tensors = self.names.hf_names(name)
            return tuple(_concatenate(self._replicate(tensor, "tensor") for tensor in tensors))
        return tuple(_concatenate(self._linear_shards(name, role)))

    def _linear_shards(self, name: str, role: ParallelStyle) -> Iterator[TensorShard]:
        for tensor in self.names.hf_names(name):
            stored, _, leaf = tensor.rpartition(".")
            # Of a weight [out, in]: its rows, or its columns for a row-parallel layer.
            features = self._shapes[f"{stored}.weight"][role is ParallelStyle.ROWWISE]
            spans = self.spans(stored, features)
            if role is not ParallelStyle.ROWWISE:
                yield from (self._shard(tensor, 0, span) for span in spans)
            elif leaf == "weight":
                [span] = spans
                yield self._shard(tensor, 1, span)
            elif self.index == 0:
                # It is added to a sum over all ranks, so only one rank may hold it.
                yield full_shard(tensor, self._shapes[tensor])

    def spans(self, layer: str, features: int) -> list[Span]:
        """This rank's features of a checkpoint layer with so many: one range, or one of each layer
        whose rows it holds (`WeightMap.row_blocks`)."""
        if self.size == 1:
            return [Span(0, features)]
        spans: list[Span] = []
        first, parent = 0, layer.rpartition(".")[0]
        for part, count in self.names.row_blocks(layer, features).items():
            span = self.span(f"{parent}.{part}", count)
            spans.append(replace(span, first=first + span.first))
            first += count
        return spans

    def span(self, layer: str, features: int = 0) -> Span:
        """This rank's features of a checkpoint layer, or of all, by the last part of the name.

        `features` is the total of a feed-forward network or of a token mixer with a state; it is
        not read for other layers.
        """
        if linear := self.names.state_layer(layer):
            heads = linear.split_heads(layer.rpartition(".")[2])
            return self._heads(heads, features // heads)
        config, unit = self.names.layer_config(layer), shard_unit(layer)
        if unit is ShardUnit.TOKEN:
            return _span(config.vocab_size, self.size, self.index)
        if unit is ShardUnit.FEATURE:
            return _span(features, self.size, self.index)
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        assert heads % self.size == 0, f"{heads} heads over {self.size} ranks"
        if unit is ShardUnit.QUERY_HEAD:
            width = config.head_dim
            if config.latent:
                width = config.latent.head_features(layer.rpartition(".")[2])
            elif layer.endswith("q_proj"):
                width = config.query_features
            return _span(heads, self.size, self.index, width)
        return self._heads(keys, config.head_dim)

    def copies(self) -> list[int]:
        """How many ranks have the same features of keys, or of what heads of a token mixer with a
        state share: each number that occurs."""
        config = self.names.config
        copies = {
            self.span(f"{LAYERS}{number}.k_proj").copies for number in range(config.num_layers)
        }
        if linear := config.linear:
            parts = {
                part for layer in linear.input_layers for part in linear.row_blocks(layer) or ()
            }
            copies |= {max(1, self.size // linear.split_heads(part)) for part in parts}
        return sorted(copies)

    def _heads(self, count: int, width: int) -> Span:
        """This rank's features of so many heads; where there are fewer than ranks, several ranks
        have the same head."""
        assert count % self.size == 0 or self.size % count == 0, f"{count} over {self.size} ranks"
        if self.size <= count:
            return _span(count, self.size, self.index, width)
        copies = self.size // count
        return replace(_span(count, count, self.index // copies, width), copies=copies)

    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a full native tensor; None if it holds nothing."""
        boxes: list[torch.Tensor] = []
        start, previous = 0, None
        for shard in self.shards(name, tuple(tensor.shape)):
            # Native tensors are checkpoint tensors concatenated.
            if previous is not None and previous.tensor != shard.tensor:
                start += previous.full_shape[0]
            previous = shard
            box = tensor.narrow(0, start + shard.offsets[0], shard.num_rows)
            for dim in range(1, tensor.ndim):
                box = box.narrow(dim, shard.offsets[dim], shard.sizes[dim])
            boxes.append(box)
        # A copy, also of one box: a view would keep the whole tensor in memory.
        return torch.cat(boxes) if boxes else None

    def is_in_moe(self, module: str) -> bool:
        """Whether a module is part of an MoE layer, which each rank computes, unsplit, for its own
        share of the tokens."""
        experts, parts = self.names.config.experts, module.split(".")
        if experts is None or parts[:2] != ["model", "layers"] or parts[3:4] != ["mlp"]:
            return False
        return int(parts[2]) in experts.layers

    def _expert_shards(self, name: str) -> Iterator[TensorShard]:
        tensors = self.names.hf_names(name)
        if len(tensors) == 1:
            [tensor] = tensors
            first = self._shapes[tensor][0]
            yield self._shard(tensor, 0, _span(first, self.expert_size, self.expert_index))
            return
        local_experts = shard_range(len(tensors), self.expert_size, self.expert_index)
        names = tensors[local_experts.start : local_experts.stop]
        yield from _concatenate(full_shard(tensor, self._shapes[tensor]) for tensor in names)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.names.hf_shapes()

    def _lora_shards(self, factor: LoraParamName, shape: tuple[int, ...]) -> Iterator[TensorShard]:
        layer = self.names.hf_layer(factor.hf_module)
        name = native_name(layer, factor.side)
        rows, columns = self._shapes[f"{layer}.weight"]
        if factor.is_embedding:
            # For an embedding, columns of A are tokens and rows of B are features.
            rows, columns = columns, rows
        is_a = factor.side == "lora_A"
        full_shape = (shape[0], columns) if is_a else (rows, *shape[1:])
        role = find_parallel_style(factor.module, self.roles)
        is_rowwise = role in (ParallelStyle.ROWWISE, ParallelStyle.VOCAB)
        is_whole = factor.module.startswith(VISION) or self.is_in_moe(factor.module)
        # Columns of A are split in a row-parallel layer, rows of B in a column-parallel one; the
        # LoRA rank never. Of the factor on the other side each rank has a part of the gradient.
        if is_whole or is_a is not is_rowwise or role is ParallelStyle.REPLICATED:
            yield self._replicate(name, "tensor", full_shape)
            return
        spans = self.spans(layer, columns if is_rowwise else rows)
        shards = (self._shard(name, int(is_a), span, full_shape) for span in spans)
        yield from shards if is_a else _concatenate(shards)

    def _expert_lora_shard(self, factor: LoraParamName, shape: tuple[int, ...]) -> TensorShard:
        name = native_name(factor.hf_module, factor.side)
        if len(shape) == 2:
            # A shared factor: its gradient is summed over ranks with other tokens or experts.
            return self._replicate(name, "tensor", shape)
        experts = self.names.config.experts
        assert experts is not None
        own = _span(experts.num_experts, self.expert_size, self.expert_index)
        return self._shard(name, 0, own, (experts.num_experts, *shape[1:]))

    def _shard(
        self, tensor: str, dim: int, span: Span, full_shape: tuple[int, ...] | None = None
    ) -> TensorShard:
        full_shape = full_shape or self._shapes[tensor]
        offsets, sizes = [0] * len(full_shape), list(full_shape)
        offsets[dim], sizes[dim] = span.first, span.count
        grad_reduce = "kv" if span.copies > 1 else None
        return TensorShard(
            tensor,
            full_shape,
            tuple(offsets),
            tuple(sizes),
            num_copies=span.copies,
            grad_reduce=grad_reduce,
        )

    def _replicate(
        self,
        tensor: str,
        grad_reduce: GradReduceAxis | None,
        full_shape: tuple[int, ...] | None = None,
    ) -> TensorShard:
        shard = full_shard(tensor, full_shape or self._shapes[tensor])
        return replace(
            shard, num_copies=self.size, grad_reduce=grad_reduce if self.size > 1 else None
        )


def tp_plan(
    model: Decoder, names: WeightMap, mesh: Mesh, *, roles: Roles, residual: Residual
) -> TensorParallelPlan:
    """The sharding plan of this rank for the model, which may be a part of the whole."""
    copied = frozenset[str]()
    if not (model.takes_ids and model.lm_head is not None):
        if model.config.tie_word_embeddings:
            copied = frozenset((EMBEDDING_WEIGHT, HEAD_WEIGHT))
        elif model.config.num_mtp_layers:
            copied = frozenset((EMBEDDING_WEIGHT,))
    return TensorParallelPlan(
        names=names,
        roles=roles,
        size=mesh.size("tensor"),
        index=mesh.index("tensor"),
        residual=residual,
        expert_size=mesh.dims.expert,
        expert_index=mesh.expert_mesh()["expert"].get_local_rank() if mesh.dims.expert > 1 else 0,
        formats={
            name: module.format
            for name, module in model.named_modules()
            if isinstance(module, QuantizedMatrix)
        },
        copied=copied,
    )


def param_shards(
    model: CausalLM,
    names: WeightMap,
    mesh: Mesh,
    *,
    roles: Roles = DECODER_ROLES,
    residual: Residual = "whole",
) -> Mapping[str, tuple[TensorShard, ...]]:
    """The shards of every parameter, by model name, after `parallelize_tensor`."""
    if not isinstance(model, Decoder):
        # Of the transformers backend: parameters are whole.
        shards: dict[str, tuple[TensorShard, ...]] = {}
        for name, parameter in model.named_parameters():
            factor = parse_lora_name(name)
            tensor = native_name(factor.hf_module, factor.side) if factor else name
            shards[name] = (full_shard(tensor, parameter.shape),)
        return shards
    plan = tp_plan(model, names, mesh, roles=roles, residual=residual)
    return {
        name: plan.shards(name, tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    }


def _quantized_shard(shard: TensorShard, leaf: str, format: Format) -> TensorShard:
    """The same box of one component tensor of a quantized matrix.

    Columns are split between quantization groups; with one scale per row they are split anywhere.
    Raises CapabilityError for a split within a group.
    """
    if len(shard.full_shape) == 3:
        # Whole experts of a stack [E, K, N] are rows of the matrix [E N, K] that is quantized.
        experts, columns, rows = shard.full_shape
        shard = replace(
            shard,
            full_shape=(experts * rows, columns),
            offsets=(shard.offsets[0] * rows, 0),
            sizes=(shard.sizes[0] * rows, columns),
        )
    rows, columns = shard.full_shape
    first, count = shard.offsets[1], shard.sizes[1]
    group = format.group or 1
    if first % group or ((first + count) % group and first + count != columns):
        raise CapabilityError(
            f"train.tensor_parallel_size cuts the {columns} columns of {shard.tensor} at {first} "
            f"and {first + count}, within groups of {group} that share a scale "
            f"({format.name}).\n"
            "  Write a smaller tensor_parallel_size, or another lora.quant_format."
        )
    width = format.widths(columns)[leaf]
    before, leaf_width = format.widths(first)[leaf] if first else 0, format.widths(count)[leaf]
    if leaf_width == width:
        # One scale for the whole row, which every rank with a part of it has.
        before = 0
    return replace(
        shard,
        tensor=f"{shard.tensor}.{leaf}",
        full_shape=(rows, width),
        offsets=(shard.offsets[0], before),
        sizes=(shard.sizes[0], leaf_width),
    )


def _concatenate(pieces: Iterable[TensorShard]) -> Iterator[TensorShard]:
    start = 0
    for shard in pieces:
        yield replace(shard, start=start)
        start += shard.num_rows


def _span(count: int, size: int, index: int, width: int = 1) -> Span:
    blocks = shard_range(count, size, index)
    return Span(blocks.start * width, len(blocks) * width)
