"""Expert parallelism: a layer's experts are split over ranks; tokens are exchanged by all-to-all.

No tokens are dropped and none are padded: every rank sends each other rank the rows routed to its
experts, however many, and gets their outputs back (Lepikhin et al. 2020, "GShard"; Gale et al.
2022, "MegaBlocks", for experts of uneven load).

T tokens of this rank, D model width, K experts per token, E experts in all, R received rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.engine.distributed.collectives import apply_collective
from penstock.engine.distributed.device_mesh import Mesh
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.dispatch_memo import recall
from penstock.models.layers.experts import Experts, Routing
from penstock.models.layers.moe import MoE
from penstock_kernels.permute import Order, sort_by_expert

RegisterDispatcher = Callable[[MoE, dist.ProcessGroup, int], None]
"""Registers a token dispatcher on an MoE layer, given its group and total number of experts."""


def moe_layers(model: CausalLM) -> list[MoE]:
    """The MoE layers of a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def parallelize_experts(
    model: CausalLM, mesh: Mesh, register_dispatcher: RegisterDispatcher
) -> None:
    """Keep this rank's experts of every layer, and register token dispatchers; in place.

    Call it on every rank before anything is sharded. The size of the expert-parallel group must
    divide the number of experts.
    """
    if mesh.dims.expert == 1:
        return
    expert_mesh = mesh.expert_mesh()["expert"]
    group, index, size = expert_mesh.get_group(), expert_mesh.get_local_rank(), expert_mesh.size()
    for moe in moe_layers(model):
        experts = moe.experts
        total = experts.num_experts
        assert total % size == 0, f"{total} experts over {size} ranks"
        experts.num_experts = total // size
        # Including the adapters of each expert.
        for name, parameter in list(experts.named_parameters()):
            # A clone: a view would keep the experts of all ranks in memory.
            local_experts = parameter.detach().chunk(size)[index].clone()
            owner, _, leaf = name.rpartition(".")
            local_param = nn.Parameter(local_experts, requires_grad=parameter.requires_grad)
            setattr(experts.get_submodule(owner), leaf, local_param)
        register_dispatcher(moe, group, total)


def use_all_to_all_dispatcher(moe: MoE, group: dist.ProcessGroup, total: int) -> None:
    """Dispatch tokens by all-to-all, which every backend supports."""
    moe.dispatch = AllToAllDispatcher(group, total)


class AllToAllDispatcher:
    """All-to-all token dispatcher of an MoE layer whose experts are on several ranks.

    Five all-to-alls per layer and micro-batch: the row counts, the rows, their outputs, and in the
    backward pass the gradients of both. Activation checkpointing repeats the rows and outputs.
    Dropout in the experts' adapters adds one, of the rows' indices.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        # Of all ranks; each holds equally many, in rank order.
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
        # The same in a recomputation, which so neither exchanges counts nor waits for them.
        plan = recall(lambda: self._plan(choice_TK, experts.num_experts))
        order, local_order = plan.order, plan.local_order
        send = partial(_all_to_all, splits=plan.splits, group=self.group)
        send_back = partial(_all_to_all, splits=plan.splits[::-1], group=self.group)
        received_RD = apply_collective(operations.permute(x_TD, order), send, send_back)
        indices_R = experts.row_indices(order)
        if indices_R is not None:
            indices_R = send(indices_R)[local_order.copy_of_row]
        outputs_RD = experts(received_RD, Routing(local_order, indices_R=indices_R))
        # Rows that no backward pass reads, [R, D] each, end here, and not with the function.
        del received_RD
        returned = apply_collective(outputs_RD, send_back, send)
        del outputs_RD
        return operations.unpermute(returned, weights_TK, order)

    def _plan(self, choice_TK: torch.Tensor, local_experts: int) -> "_DispatchPlan":
        order = sort_by_expert(choice_TK, self.num_experts)
        # Rows sorted by expert are sorted by rank as well.
        send_counts = order.counts.reshape(self.group.size(), -1)
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts, group=self.group)
        # In one tensor, because reading each would stall the device once more.
        splits = torch.stack((send_counts.sum(1), recv_counts.sum(1)))
        values = splits.tolist()
        if isinstance(splits, FakeTensor):
            # A dry run has no values: rows are shared out evenly.
            values = torch.full(splits.shape, choice_TK.numel() // self.group.size()).tolist()
        # Received rows are ordered by source rank, then by expert.
        expert_ids = torch.arange(local_experts, device=recv_counts.device)
        # Without the size, repeat_interleave would read the counts from the device again.
        expert_R = expert_ids.repeat(self.group.size()).repeat_interleave(
            recv_counts.flatten(), output_size=sum(values[1])
        )
        return _DispatchPlan(order, values, sort_by_expert(expert_R.unsqueeze(1), local_experts))


@dataclass(frozen=True, eq=False)
class _DispatchPlan:
    order: Order
    """Of this rank's rows, by the experts of all ranks."""
    splits: list[list[int]]
    """Rows that are sent to each rank, and received from each."""
    local_order: Order
    """Of the received rows, by the experts of this rank."""


def _all_to_all(
    rows: torch.Tensor, splits: list[list[int]], group: dist.ProcessGroup
) -> torch.Tensor:
    send_splits, recv_splits = splits
    out = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    # Not `all_to_all`, which fails on gloo for lists of tensors of uneven sizes (torch 2.13).
    dist.all_to_all_single(out, rows.contiguous(), recv_splits, send_splits, group=group)
    return out
