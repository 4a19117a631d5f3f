"""Expert parallelism: a layer's experts are split over ranks; tokens are exchanged by all-to-all.

No tokens are dropped and none are padded: every rank sends each other rank the rows routed to its
experts, however many, and gets their outputs back (Lepikhin et al. 2020, "GShard"; Gale et al.
2022, "MegaBlocks", for experts of uneven load).

T tokens of this rank, D model width, K experts per token, E experts in all, R received rows.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.engine.distributed.device_mesh import Mesh
from penstock.models.decoder import Decoder
from penstock.models.layers.experts import Experts
from penstock.models.layers.moe import MoE
from penstock_kernels.permute import sort_by_expert, unpermute

Plug = Callable[[MoE, dist.ProcessGroup, int], None]
"""Registers a token dispatcher on an MoE layer, given its group and total number of experts."""


def moe_layers(model: Decoder) -> list[MoE]:
    """The MoE layers of a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def parallelize_experts(model: Decoder, mesh: Mesh, plug: Plug) -> None:
    """Keep this rank's experts of every layer, and register token dispatchers with `plug`; in
    place.

    Call it on every rank before anything is sharded. The size of the expert-parallel group must
    divide the number of experts. Does nothing without expert parallelism.
    """
    if mesh.dims.expert == 1:
        return
    along = mesh.expert_mesh()["expert"]
    group, index, size = along.get_group(), along.get_local_rank(), along.size()
    for mixture in moe_layers(model):
        experts = mixture.experts
        total = experts.num_experts
        assert total % size == 0, f"{total} experts over {size} ranks"
        experts.num_experts = total // size
        # Including the adapters of each expert.
        for name, parameter in list(experts.named_parameters()):
            mine = parameter.detach().chunk(size)[index].clone()
            owner, _, leaf = name.rpartition(".")
            kept = nn.Parameter(mine, requires_grad=parameter.requires_grad)
            setattr(experts.get_submodule(owner), leaf, kept)
        plug(mixture, group, total)


def use_all_to_all_dispatcher(mixture: MoE, group: dist.ProcessGroup, total: int) -> None:
    """Dispatch tokens by all-to-all, which every backend supports."""
    mixture.dispatch = Dispatch(group, total)


class Dispatch:
    """All-to-all token dispatcher of an MoE layer whose experts are on several ranks.

    Five all-to-alls per layer and micro-batch: the row counts, the rows, their outputs, and in the
    backward pass the gradients of both. With activation checkpointing the first three are repeated.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """`num_experts` counts the experts of all ranks; each rank holds equally many, in rank
        order.
        """
        self.group, self.num_experts = group, num_experts

    def __call__(
        self,
        x_TD: torch.Tensor,
        choice_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Experts,
        /,
    ) -> torch.Tensor:
        """Send each row to the rank of its expert, and sum the outputs that come back, [T, D]."""
        operations = experts.operations
        order = sort_by_expert(choice_TK, self.num_experts)
        # Rows sorted by expert are sorted by rank as well.
        rows = operations.permute(x_TD, order)
        leaving = order.counts.reshape(self.group.size(), -1)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sends, receives = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
        arrived_RD = _Exchange.apply(rows, sends, receives, self.group)
        # Received rows are ordered by source rank, then by expert.
        numbers = torch.arange(experts.num_experts, device=arriving.device)
        expert_R = numbers.repeat(self.group.size()).repeat_interleave(arriving.flatten())
        here = sort_by_expert(expert_R.unsqueeze(1), experts.num_experts)
        y_RD = experts(operations.permute(arrived_RD, here), here.counts)
        made_RD = unpermute(y_RD, None, here)
        returned = _Exchange.apply(made_RD, receives, sends, self.group)
        return operations.unpermute(returned, weights_TK, order)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: `sends[i]` to rank i and `receives[i]` from it.

    The backward pass runs the reverse all-to-all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sends: list[int],
        receives: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _exchanged(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receives, sends, group=group)
    return out
