"""Tensor parallelism: attention, the feed-forward network and the LM head are split over ranks.

Each rank computes some of their features (Shoeybi et al. 2019, "Megatron-LM"). Parameters become
smaller ordinary parameters. Ranks communicate only at the boundaries of such a region, so nothing
inside it depends on the split.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.adapters.lora import LoraLinear
from penstock.adapters.lora_embedding import LoraEmbedding
from penstock.engine.distributed.collectives import (
    ReduceDtype,
    Residual,
    copy_to_tp_region,
    gather_from_sequence_parallel,
    local_share,
    reduce_from_tp_region,
    scatter_to_sequence_parallel,
)
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.tensor_sharding import TensorParallelPlan, tp_plan
from penstock.engine.distributed.vocab_parallel import VocabParallelEmbedding, lookup_local_rows
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.layers.attention import SelfAttention
from penstock.models.layers.block import CALL_HOOKS, PART_NAMES, Block
from penstock.models.layers.call_hook import CallHook
from penstock.models.layers.dropout import Dropout, WeightDropout
from penstock.models.layers.feed_forward import FeedForward, FusedFeedForward, PlainFeedForward
from penstock.models.layers.indexer import Indexer
from penstock.models.layers.moe import MoE
from penstock.models.layers.norm import GatedRMSNorm, RMSNorm
from penstock.models.layers.positions import PositionTable
from penstock.models.layers.quantized_linear import QuantizedMatrix
from penstock.models.layers.router import Router
from penstock.models.tp_roles import ParallelStyle, Roles, find_parallel_style
from penstock.models.vision.tower import VisionTower
from penstock_kernels.sparse_attention import HeadSharing

REDUCE_DTYPES: Mapping[str | None, ReduceDtype] = {
    None: None,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def parallelize_tensor(
    model: CausalLM,
    mesh: Mesh,
    roles: Roles,
    *,
    residual: Residual,
    reduce_dtype: ReduceDtype = None,
) -> None:
    """Shard the model, or a part of it, to this rank of the tensor axis, in place.

    Call it on every rank, after adapters are injected and before anything else is sharded; the
    model may have storage or be on the meta device. Afterwards the model returns hidden states [T,
    D] (with `split`, the rank's share of the tokens) and needs
    `VocabParallelHead.sum_cross_entropy` as its `reduce`, because its head returns a shard of the
    logits.
    """
    group = mesh.group("tensor")
    if group is None:
        return
    assert isinstance(model, Decoder)
    names = model.weight_map
    plan = tp_plan(model, names, mesh, roles=roles, residual=residual)
    # Created now because all ranks must create groups, and a part may have no key projection.
    for copies in plan.copies():
        mesh.adjacent_group(copies)
    # A list: the loop replaces the parameters.
    for name, parameter in list(model.named_parameters()):
        if not plan.is_in_moe(name):
            parent, _, leaf = name.rpartition(".")
            shard = plan.shard(name, parameter.detach())
            local_param = (
                None
                if shard is None
                else nn.Parameter(shard, requires_grad=parameter.requires_grad)
            )
            setattr(model.get_submodule(parent), leaf, local_param)
    # `named_parameters` names a shared parameter once: the head still has the whole one.
    if model.is_tied:
        model.tie_weights()
    for name, module in model.named_modules():
        _update_module(module, name, plan, mesh)
    if (table := model.model.embed_tokens) is not None:
        first = plan.span("embed_tokens").first
        if isinstance(table, LoraEmbedding):
            table.lookup = partial(lookup_local_rows, first=first)
            table.reduce_output = partial(reduce_from_tp_region, group=group, residual=residual)
            table.sum_squares = partial(_all_reduce_sum, group=group)
        else:
            weight = table.get_parameter("weight")
            model.model.embed_tokens = VocabParallelEmbedding(weight, first, group, residual)
    for number, layer in model.model.layers.items():
        assert isinstance(layer, Block)
        if isinstance(layer.token_mixer, SelfAttention):
            parts = model.config.of_layer(int(number)).qkv_features
            spans = [plan.span(f"model.layers.{number}.{part}") for part in parts]
            layer.token_mixer.qkv_sizes = [span.count for span in spans]
        for part, socket in CALL_HOOKS.items():
            # Of a part that the layer has not, nothing calls the hook.
            is_moe = isinstance(layer.part(part), MoE)
            region = _moe_forward if is_moe else partial(_tp_forward, reduce_dtype=reduce_dtype)
            run = partial(region, getattr(layer, socket), group=group, residual=residual)
            setattr(layer, socket, run)


@torch.no_grad()
def reduce_partial_grads(params: Sequence[LocalParam], mesh: Mesh) -> None:
    """All-reduce gradients of which each rank of the tensor axis has a partial sum, in place.

    Called when gradients are otherwise final, on all ranks of the axis with the same parameters.
    """
    grads_by_group: dict[tuple[int | None, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for param in params:
        if param.parameter.grad is None:
            continue
        gradient = local(param.parameter.grad)
        for piece in param.shards:
            if piece.grad_reduce is not None:
                group_size = piece.num_copies if piece.grad_reduce == "kv" else None
                grads_by_group[group_size, gradient.dtype].append(piece.view(gradient))
    for (group_size, _), views in grads_by_group.items():
        # Offloaded gradients are in host memory, where the group cannot reduce them.
        flat = torch.cat([view.reshape(-1) for view in views]).to(mesh.device_type)
        group = mesh.group("tensor") if group_size is None else mesh.adjacent_group(group_size)
        dist.all_reduce(flat, group=group)
        sums = flat.split([view.numel() for view in views])
        torch._foreach_copy_(
            views, [part.view_as(view) for part, view in zip(sums, views, strict=True)]
        )


def _resize(
    module: nn.Linear, weight: str, plan: TensorParallelPlan, group: dist.ProcessGroup
) -> None:
    rows, columns = module.out_features, module.in_features
    if isinstance(module.weight, QuantizedMatrix):
        [piece, *_] = plan.shards(weight, tuple(module.weight.shape))
        module.weight.columns = piece.sizes[1]
    module.out_features, module.in_features = module.weight.shape
    if not isinstance(module, LoraLinear):
        return
    if module.out_features != rows:
        shapes = plan.names.hf_shapes()
        layers = {
            tensor.removesuffix(".weight"): shapes.get(tensor, (rows,))[0]
            for tensor in plan.names.hf_names(weight)
        }
        module.parts = {
            layer.rpartition(".")[2]: sum(span.count for span in plan.spans(layer, count))
            for layer, count in layers.items()
        }
    # Of a row-parallel layer: dropout draws by feature, and squares of a row are on all ranks.
    if module.in_features != columns:
        for dropout in module.lora_dropout.values():
            assert isinstance(dropout, Dropout)
            dropout.first_feature = plan.span(dropout.site, columns).first
        module.sum_squares = partial(_all_reduce_sum, group=group)


def _update_module(module: nn.Module, name: str, plan: TensorParallelPlan, mesh: Mesh) -> None:
    group = mesh.group("tensor")
    assert group is not None
    parts = name.split(".")
    in_stream = parts[:2] == ["model", "layers"] and not {*PART_NAMES} & {*parts}
    has_token_share = plan.residual == "split" if in_stream else plan.is_in_moe(name)
    if isinstance(module, nn.Linear) and not plan.is_in_moe(name):
        _resize(module, f"{name}.weight", plan, group)
    if isinstance(module, Dropout) and has_token_share:
        module.local_token_indices = partial(local_share, group=group)
    style = find_parallel_style(name, plan.roles) if isinstance(module, RMSNorm) else None
    if isinstance(module, RMSNorm) and style is ParallelStyle.SPLIT_NORM:
        width = plan.names.native_shape(f"{name}.weight")[0]
        [shard] = plan.shards(f"{name}.weight", (width,))
        module.mean_squares = partial(_mean_squares, features=width * shard.num_copies, group=group)
    if isinstance(module, GatedRMSNorm) and (ranks := module.group_width // len(module.weight)) > 1:
        norm_group = mesh.adjacent_group(ranks)
        assert norm_group is not None
        module.mean_squares = partial(_mean_squares, features=module.group_width, group=norm_group)
    if isinstance(module, FeedForward | FusedFeedForward | PlainFeedForward) and module.dropout:
        inner = plan.names.config.intermediate_size
        module.dropout.first_feature = plan.span("down_proj", inner).first
    if isinstance(module, VisionTower) and plan.residual == "split":
        module.local_share = partial(local_share, group=group)
    if isinstance(module, PositionTable) and plan.residual == "split":
        module.local_positions = partial(local_share, group=group)
    if isinstance(module, WeightDropout):
        # Its features are heads.
        module.first_feature = plan.span("q_proj").first // plan.names.config.query_features
    if isinstance(module, Indexer):
        sum_over_ranks = partial(_all_reduce_sum, group=group)
        module.sharing = HeadSharing(plan.size, plan.index, sum_over_ranks)
    if isinstance(module, Router):
        module.local_rows = partial(local_share, group=group)


def _mean_squares(x_TD: torch.Tensor, features: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean square of each token's features on all ranks, [T, 1]. `features` counts copies."""
    squares_T1 = x_TD.square().sum(-1, keepdim=True)
    # What follows differs by rank, so each has a part of the sum's gradient.
    summed_T1 = copy_to_tp_region(reduce_from_tp_region(squares_T1, group, "whole"), group, "whole")
    return summed_T1 / features


def _all_reduce_sum(partial_sums: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(partial_sums, group=group)
    return partial_sums


def _tp_forward(
    run: CallHook,
    module: nn.Module,
    x_TD: torch.Tensor,
    *args: Any,
    group: dist.ProcessGroup,
    residual: Residual,
    reduce_dtype: ReduceDtype,
) -> torch.Tensor:
    y_TD = run(module, copy_to_tp_region(x_TD, group, residual, reduce_dtype), *args)
    return reduce_from_tp_region(y_TD, group, residual, reduce_dtype)


def _moe_forward(
    run: CallHook,
    module: nn.Module,
    x_TD: torch.Tensor,
    *args: Any,
    group: dist.ProcessGroup,
    residual: Residual,
) -> torch.Tensor:
    """The output of an unsharded module that each rank computes for its share of the tokens."""
    if residual == "split":
        return run(module, x_TD, *args)
    y_TD = run(module, scatter_to_sequence_parallel(x_TD, group), *args)
    return gather_from_sequence_parallel(y_TD, group, x_TD.shape[0])
