"""Time of a kernel or collective on a named machine: the larger of compute and memory traffic."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from penstock.core.machine.device_specs import Device
from penstock.estimate.costs.device_speed import NETWORK_BANDWIDTH

ACHIEVED_FLOPS = 0.65
"""Share of a data sheet's FLOP/s that large matmuls reach."""

ACHIEVED_GROUPED_FLOPS = 0.3
"""The same for grouped GEMMs of experts, fitted to measured steps of Qwen3-30B-A3B and gpt-oss-20B
on an H200 (docs/benchmarks/dry.md)."""

ACHIEVED_BANDWIDTH = 0.8
"""Share of a data sheet's memory bandwidth that elementwise kernels reach."""

ACHIEVED_LINK = 0.75
"""Share of link bandwidth that collectives of many megabytes reach."""

KERNEL_SECONDS = 3e-6
"""Least time of a kernel."""

COLLECTIVE_LATENCY = 15e-6
"""Time of a collective without data in one machine; twice that between machines."""


HOST_COPY_BANDWIDTH = 25e9
"""Bytes per second between pinned host memory and the device (PCIe 4 x16)."""

_GROUPED_MATMULS = (torch.ops.aten._grouped_mm, torch.ops.aten._scaled_grouped_mm)

# A ring all-reduce is a reduce-scatter and an all-gather: each byte travels twice.
_RING_FACTOR = {"allreduce": 2.0, "reduce": 1.0, "broadcast": 1.0}


@dataclass
class Roofline:
    """Durations on one kind of device, and the FLOPs so far."""

    device: Device
    local_ranks: int
    """Ranks per machine."""
    pairs_per_token: float
    """Mean number of keys that a query attends to."""
    flops: float = 0.0

    def kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
        """Seconds of an operator on the device."""
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        is_grouped = getattr(func, "_overloadpacket", None) in _GROUPED_MATMULS
        achieved = ACHIEVED_GROUPED_FLOPS if is_grouped else ACHIEVED_FLOPS
        return self.seconds(tensors, self._flops(func, args, kwargs, out), achieved)

    def attention(self, name: str, tensors: Sequence[torch.Tensor]) -> float:
        """Seconds of an attention kernel, of whose tensors the query is the first."""
        return self.seconds(tensors, self._attention_flops(name, tensors[0]))

    def seconds(
        self, tensors: Sequence[torch.Tensor], flops: float, achieved: float = ACHIEVED_FLOPS
    ) -> float:
        """Seconds of a kernel that moves these tensors and computes so much, at this share of a
        data sheet's FLOP/s."""
        self.flops += flops
        moved = self.moving(sum(map(_traffic, tensors)))
        computed = flops / (self._peak(tensors) * achieved) if flops else 0.0
        return max(KERNEL_SECONDS, moved, computed)

    def moving(self, num_bytes: float) -> float:
        """Seconds to read or write these bytes in device memory."""
        return num_bytes / (self.device.bandwidth * ACHIEVED_BANDWIDTH)

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
            return self._attention_flops(name, query)
        if func is torch.ops.aten.addmm.dtype_out:
            # Its formula knows no dtype of the result.
            _, left, right, *_ = args
            return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
        if func._overloadpacket in _GROUPED_MATMULS:
            # [R, K] by [G, K, N], or [M, R] by [R, N] for each group's rows.
            return 2.0 * args[0].numel() * args[1].shape[-1]
        formula = flop_registry.get(func._overloadpacket)
        return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0

    def _attention_flops(self, name: str, query: torch.Tensor) -> float:
        # Scores and weighted values: 2 matmuls of head_dim multiply-adds per pair.
        # Backward has 5 matmuls, with the scores computed again (Dao 2023, "FlashAttention-2").
        backward = 2.5 if "backward" in name else 1.0
        return 4 * query.numel() * self.pairs_per_token * backward

    def _peak(self, tensors: Sequence[torch.Tensor]) -> float:
        # Tensor cores work in the narrowest dtype of a kernel's operands.
        width = min((t.element_size() for t in tensors if t.is_floating_point()), default=4)
        peak = {1: self.device.fp8, 2: self.device.bf16 or self.device.fp16}.get(width)
        return peak or self.device.fp32


def _traffic(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that are moved; an expanded tensor is read once."""
    moved = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        moved *= size if stride else 1
    return moved
