"""Data parallelism: what `none`, `ddp` and `fsdp2` do to a model.

Gradients come out summed over replicas, never averaged: the loss is already divided by the trained
tokens of the whole step, so a sum is the exact gradient whatever the number of replicas.
"""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.config.train import TrainConfig


def shard(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, train: TrainConfig) -> None:
    """Shard parameters over the mesh's `shard` axis with FSDP2, unit by unit, in place."""
    mixed = train.enable_mixed_precision
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32 if mixed else None
    )
    reshard = True if train.reshard_after_forward is None else train.reshard_after_forward
    for unit in units:
        fully_shard(unit, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=reshard)
    # The root is needed again first thing in backward; resharding it would only gather it twice.
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A factor of 1 with a forced sum is exact on NCCL and gloo alike, also on one rank.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if train.enable_forward_prefetch:
        # Modules are listed in the order they run in, which units written by name need not be.
        in_order = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
        for unit, following in pairwise(in_order):
            unit.set_modules_to_forward_prefetch([following])


def replicate(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap the model so that each backward combines gradients over all ranks."""
    return DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )


def backward_scale(model: nn.Module, world: int) -> float:
    """What a loss is multiplied by so that the layout's reduction comes out as a sum.

    DistributedDataParallel divides by the world; its reduction in C++ has no other setting.
    """
    return float(world) if isinstance(model, DistributedDataParallel) else 1.0


@contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Generator[None]:
    """Keep gradients local until the `last` micro-batch of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield
