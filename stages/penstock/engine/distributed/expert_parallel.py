"""Expert parallelism: each rank of a group holds some of a layer's experts, and tokens travel.

Nothing is dropped and nothing padded: every rank sends each other one the rows that chose its
experts, however many these are, and gets back what became of them (Lepikhin et al. 2020, "GShard";
Gale et al. 2022, "MegaBlocks", for experts of uneven load).

T tokens of this rank, D model width, K experts per token, E experts in all, R rows that arrive.
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
"""Gives a mixture, whose experts are on the ranks of a group and so many in all, its sockets."""


def moe_layers(model: Decoder) -> list[MoE]:
    """The mixtures of experts in a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def parallelize_experts(model: Decoder, mesh: Mesh, plug: Plug) -> None:
    """Keep of every layer's experts those that are this rank's, and let tokens travel as `plug`
    says; in place.

    To be called on every rank before anything is sharded. The ranks that share experts must be as
    many as divide the experts. Without any that share: nothing.
    """
    if mesh.degrees.expert == 1:
        return
    along = mesh.experts()["expert"]
    group, index, size = along.get_group(), along.get_local_rank(), along.size()
    for mixture in moe_layers(model):
        experts = mixture.experts
        total = experts.num_experts
        assert total % size == 0, f"{total} experts over {size} ranks"
        experts.num_experts = total // size
        # With those of adapters that each expert has for itself.
        for name, parameter in list(experts.named_parameters()):
            mine = parameter.detach().chunk(size)[index].clone()
            owner, _, leaf = name.rpartition(".")
            kept = nn.Parameter(mine, requires_grad=parameter.requires_grad)
            setattr(experts.get_submodule(owner), leaf, kept)
        plug(mixture, group, total)


def use_all_to_all_dispatcher(mixture: MoE, group: dist.ProcessGroup, total: int) -> None:
    """Tokens travel by the collectives that every backend has."""
    mixture.dispatch = Dispatch(group, total)


class Dispatch:
    """The socket of a mixture whose experts are on several ranks.

    Five messages in a layer and micro-batch: how many rows go where, the rows, and back what was
    made of them; in the backward pass the gradients of both. Where the layer is recomputed, the
    first three are repeated.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """`num_experts` are those of all ranks; each has equally many, in the order of ranks."""
        self.group, self.num_experts = group, num_experts

    def __call__(
        self,
        x_TD: torch.Tensor,
        choice_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Experts,
        /,
    ) -> torch.Tensor:
        """Send each row to the rank of its expert, and add up what comes back, [T, D]."""
        operations = experts.operations
        order = sort_by_expert(choice_TK, self.num_experts)
        # Sorted by expert, rows are sorted by rank as well.
        rows = operations.permute(x_TD, order)
        leaving = order.counts.reshape(self.group.size(), -1)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sends, receives = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
        arrived_RD = _Exchange.apply(rows, sends, receives, self.group)
        # They come by rank, and for each rank by expert.
        numbers = torch.arange(experts.num_experts, device=arriving.device)
        expert_R = numbers.repeat(self.group.size()).repeat_interleave(arriving.flatten())
        here = sort_by_expert(expert_R.unsqueeze(1), experts.num_experts)
        y_RD = experts(operations.permute(arrived_RD, here), here.counts)
        made_RD = unpermute(y_RD, None, here)
        returned = _Exchange.apply(made_RD, receives, sends, self.group)
        return operations.unpermute(returned, weights_TK, order)


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, `sends[i]` of them to rank i, and `receives[i]` from it. Its gradient
    goes the other way."""

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
