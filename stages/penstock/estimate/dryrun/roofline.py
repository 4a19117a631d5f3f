"""What a kernel or collective has to do on a named machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from penstock.core.machine.device_specs import Device
from penstock.estimate.costs.device_speed import NETWORK_BANDWIDTH
from penstock.estimate.dryrun.achieved import (
    ACHIEVED_LINK,
    COLLECTIVE_LATENCY,
    HOST_COPY_BANDWIDTH,
    KERNEL_SECONDS,
    Work,
)
from penstock.estimate.dryrun.operators import operator_traffic, triton_traffic
from penstock.estimate.dryrun.rows import mean_pairs_per_token

# A ring all-reduce is a reduce-scatter and an all-gather: each byte travels twice.
_RING_FACTOR = {"allreduce": 2.0, "reduce": 1.0, "broadcast": 1.0}


@dataclass
class Roofline:
    """Work and durations on one kind of device, and the FLOPs so far."""

    device: Device
    local_ranks: int
    """Ranks per machine."""
    documents: Sequence[int]
    """Lengths of a row's documents, outside of which attention computes nothing."""
    flops: float = 0.0

    def kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work:
        """An operator on the device."""
        num_bytes, tensors = operator_traffic(func, args, kwargs, out)
        return self._work(tensors, num_bytes, self._flops(func, args, kwargs, out))

    def attention(self, name: str, tensors: Sequence[torch.Tensor]) -> Work:
        """An attention kernel, of whose tensors the query is the first."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return self._work(tensors, num_bytes, self._attention_flops(name, tensors[0], None))

    def triton(self, name: str, source: str, values: Mapping[str, Any], flops: float) -> Work:
        """A Triton kernel with this source and these arguments."""
        tensors = [x for x in values.values() if isinstance(x, torch.Tensor)]
        return self._work(tensors, triton_traffic(name, source, values), flops)

    def _work(self, tensors: Sequence[torch.Tensor], num_bytes: float, flops: float) -> Work:
        """A kernel that moves so many bytes and computes so much with these tensors."""
        self.flops += flops
        return Work(
            flops / self._peak(tensors) if flops else 0.0, num_bytes / self.device.bandwidth
        )

    def host_copy(self, num_bytes: float) -> float:
        """Seconds of a copy between host and device."""
        return max(KERNEL_SECONDS, num_bytes / HOST_COPY_BANDWIDTH)

    def collective(self, name: str, num_bytes: int, ranks: Sequence[int]) -> float:
        """Seconds of a collective whose largest tensor on this rank has these bytes."""
        size = len(ranks)
        if size < 2:
            return KERNEL_SECONDS
        machines = {rank // self.local_ranks for rank in ranks}
        is_local = len(machines) == 1
        share = _RING_FACTOR.get(name, 1.0) * (size - 1) / size
        if name in ("send", "recv"):
            share = 1.0
        link = self.device.link
        if not is_local:
            # Each machine's ranks of the group share the traffic to the next machine.
            per_machine = size / len(machines)
            link = min(link, NETWORK_BANDWIDTH * per_machine)
        latency = COLLECTIVE_LATENCY * (1 if is_local else 2 + math.log2(len(machines)))
        return latency + share * num_bytes / (link * ACHIEVED_LINK)

    def _flops(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
        name = func._schema.name
        if "attn" in name or "attention" in name:
            query = next(x for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            return self._attention_flops(name, query, _window(func, args, kwargs))
        packet = func._overloadpacket
        if func is torch.ops.aten.addmm.dtype_out or packet is torch.ops.aten.addmm_:
            # The formula knows no dtype of the result, and is registered for `addmm` alone.
            _, left, right, *_ = args
            return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
        if packet in (torch.ops.aten._grouped_mm, torch.ops.aten._scaled_grouped_mm):
            # [R, K] by [G, K, N], or [M, R] by [R, N] for each group's rows.
            return 2.0 * args[0].numel() * args[1].shape[-1]
        formula = flop_registry.get(packet)
        return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0

    def _attention_flops(self, name: str, query: torch.Tensor, window: int | None) -> float:
        # Scores and weighted values: 2 matmuls of head_dim multiply-adds per pair.
        # Backward has 5 matmuls, with the scores computed again (Dao 2023, "FlashAttention-2").
        backward = 2.5 if "backward" in name else 1.0
        return 4 * query.numel() * mean_pairs_per_token(self.documents, window) * backward

    def _peak(self, tensors: Sequence[torch.Tensor]) -> float:
        # Tensor cores work in the narrowest dtype of a kernel's operands.
        width = min((t.element_size() for t in tensors if t.is_floating_point()), default=4)
        peak = {1: self.device.fp8, 2: self.device.bf16 or self.device.fp16}.get(width)
        return peak or self.device.fp32


def _window(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Keys before its own that a query attends to; None if there is no window."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    values |= kwargs
    left = values.get("window_size_left")
    if left is None and values.get("window_size"):
        left = values["window_size"][0]
    return None if left is None or left < 0 else int(left)
