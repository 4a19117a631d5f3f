"""Parameters as ranks of different layouts hold them, cut by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from penstock.engine.distributed.param_shards import (
    LocalParam,
    TensorShard,
    full_shard,
    local,
    make_local_param,
)
from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.weights import WeightMap

CONFIG = DecoderConfig(
    vocab_size=13,
    hidden_size=6,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    qk_norm=True,
    qkv_bias=True,
    experts=ExpertsConfig(
        layers=(1,), num_experts=3, experts_per_token=2, intermediate_size=5, selection_bias=(1, 3)
    ),
)

Layout = Literal["copies", "hybrid", "sharded", "tensor", "stages"]
LAYOUTS: tuple[Layout, ...] = ("copies", "hybrid", "sharded", "tensor", "stages")
"""Of four ranks: whole on each; two copies of two shards; four shards; shards of the halves that
two ranks compute with; layer by layer on two ranks, one of which has the end alone."""

WIDE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWWISE = ("o_proj", "down_proj")


def holding(layout: Layout, *, merge_qkv: bool) -> list[LocalParam]:
    """What this rank of four holds, unfilled."""
    rank = dist.get_rank()
    names = WeightMap(CONFIG, merge_qkv)
    pieces = {name: _whole(name, names) for name in names.native_names()}
    if layout == "tensor":
        pieces = {name: _half(parts, rank % 2) for name, parts in pieces.items()}
    if layout == "stages":
        last = rank % 2
        pieces = {
            name: parts
            for name, parts in pieces.items()
            if last == (name.startswith(("model.layers.1", "model.norm", "lm_head")))
        }
    bag = nn.ParameterList(
        [
            nn.Parameter(torch.full(_shape(name, parts, names), torch.nan))
            for name, parts in pieces.items()
        ]
    )
    shape = {"copies": (4, 1), "hybrid": (2, 2), "sharded": (1, 4), "tensor": (1, 2)}
    copies = None
    if layout in shape:
        grid = torch.arange(4).reshape(-1, 2).T if layout == "tensor" else torch.arange(4)
        mesh = DeviceMesh(
            "cpu",
            grid.reshape(-1, *shape[layout]),
            mesh_dim_names=("rest", "replicate", "shard"),
        )
        copies = mesh.get_group("replicate") if shape[layout][0] > 1 else None
        if layout != "copies":
            fully_shard(bag, mesh=mesh["replicate", "shard"])
    else:
        copies = DeviceMesh("cpu", torch.arange(4).reshape(2, 2).T).get_group(1)
    return [
        make_local_param(name, parameter, parts, replica_group=copies)
        for (name, parts), parameter in zip(pieces.items(), bag.parameters(), strict=True)
    ]


def cut(whole: torch.Tensor, piece: TensorShard) -> torch.Tensor:
    """The box of a whole tensor, by plain slices."""
    ends = zip(piece.offsets, piece.sizes, strict=True)
    return whole[tuple(slice(first, first + size) for first, size in ends)]


def worst(held: list[LocalParam], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The tensors of which a piece here is not, to the bit, what it should be."""
    return [
        piece.tensor
        for one in held
        for piece in one.shards
        if not torch.equal(
            piece.view(local(one.parameter).detach()), cut(tensors[piece.tensor], piece).float()
        )
    ]


def _whole(name: str, names: WeightMap) -> tuple[TensorShard, ...]:
    shapes, parts, start = names.hf_shapes(), [], 0
    for tensor in names.hf_names(name):
        parts.append(replace(full_shard(tensor, shapes[tensor]), start=start))
        start += shapes[tensor][0]
    return tuple(parts)


def _half(parts: tuple[TensorShard, ...], index: int) -> tuple[TensorShard, ...]:
    found, start = [], 0
    for piece in parts:
        module = piece.tensor.split(".")[-2]
        dim = (
            0 if module in WIDE else 1 if module in ROWWISE and len(piece.full_shape) > 1 else None
        )
        if ".experts." in piece.tensor:
            dim = None
        offsets, sizes = list(piece.offsets), list(piece.sizes)
        if dim is not None:
            middle = piece.full_shape[dim] // 2
            offsets[dim] = index * middle
            sizes[dim] = piece.full_shape[dim] - middle if index else middle
        found.append(replace(piece, offsets=tuple(offsets), sizes=tuple(sizes), start=start))
        start += sizes[0]
    return tuple(found)


def _shape(name: str, parts: tuple[TensorShard, ...], names: WeightMap) -> tuple[int, ...]:
    if all(piece.sizes == piece.full_shape for piece in parts):
        return names.native_shape(name)
    return (sum(piece.num_rows for piece in parts), *parts[0].sizes[1:])
