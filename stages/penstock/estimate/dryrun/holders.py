"""What holds memory at the peak: weights, gradients, optimizer states, activations, buffers."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from penstock.engine.build import BuiltModel
from penstock.estimate.dryrun.memory import Allocation, MemoryTracker, Peak

Holder = Literal[
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "buffers",
    "temporary",
]
"""gathered: unsharded weights of FSDP. buffers: copies that collectives send or receive. temporary:
the rest, such as gradients of activations."""

HOLDERS: tuple[Holder, ...] = get_args(Holder)

_COLLECTIVES = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
_GATHERED = "torch/distributed/fsdp/_fully_shard/_fsdp_param"
_LOSSES = (
    "losses/",
    "kernels/cross_entropy/",
    "engine/losses/",
    "engine/distributed/vocab_parallel",
)


@dataclass
class Owners:
    """The storages that are known to hold weights, gradients or optimizer states."""

    built: BuiltModel
    memory: MemoryTracker
    gradients: set[int | None] = field(default_factory=set)

    def note_gradients(self) -> None:
        """Remember the gradients that exist now, between the backward pass and the update."""
        for local_param in self.built.engine.model.trainable:
            if local_param.parameter.grad is not None:
                self.gradients.add(self.memory.storage_number(local_param.parameter.grad))

    def holders(self, peak: Peak) -> dict[Holder, int]:
        """Bytes at the peak by what holds them."""
        number = self.memory.storage_number
        weights = {number(param.parameter) for param in self.built.engine.model.params}
        states = set(map(number, _tensors(self.built.engine.optimizer.state.values())))
        shapes = {tuple(param.parameter.shape) for param in self.built.engine.model.params}
        bytes_by_holder: Counter[Holder] = Counter()
        for storage, allocation, num_bytes in peak.live:
            if storage in weights:
                holder: Holder = "weights"
            elif storage in states:
                holder = "optimizer"
            elif storage in self.gradients:
                holder = "gradients"
            else:
                holder = _holder(allocation, shapes)
            bytes_by_holder[holder] += num_bytes
        return {holder: bytes_by_holder[holder] for holder in HOLDERS}


def _holder(allocation: Allocation, weight_shapes: set[tuple[int, ...]]) -> Holder:
    if allocation.library.startswith(_GATHERED):
        return "gathered"
    if allocation.library.startswith(_COLLECTIVES):
        return "buffers"
    if allocation.call_site.startswith(_LOSSES):
        return "logits"
    if allocation.phase == "forward" or allocation.is_forward:
        return "activations"
    if allocation.node and allocation.shape in weight_shapes:
        return "gradients"
    if "collective" in allocation.call_site or "bucketed" in allocation.call_site:
        return "buffers"
    return "temporary"


def _tensors(states: Iterable[Mapping[str, object]]) -> Iterable[torch.Tensor]:
    for state in states:
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
