"""Data parallelism: what `none`, `ddp` and `fsdp2` do to a model's parts.

Gradients come out summed over ranks, never averaged: the loss is already divided by the trained
tokens of the whole step, so a sum is the exact gradient whatever the number of ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from penstock.engine.parallel.replicas import GradientSums
from penstock.engine.parallel.zero import Kept


class GradientSync(Protocol):
    """What happens to gradients as a step goes on."""

    def before(self, *, last: bool) -> None:
        """A forward and backward pass begins; `last`: of the step."""
        ...

    def finish(self) -> None:
        """The step's last backward pass has ended; return when all gradients are sums."""
        ...


@dataclass(frozen=True)
class Sharding:
    """How weights are sharded."""

    kept: Kept
    compute: torch.dtype | None
    """Of gathered weights and activations; None: the weights' own."""
    reduce: torch.dtype | None
    """Of gradients on their way; None: the dtype of compute."""
    offload: bool
    """Whether sharded weights, gradients and optimizer states lie in host memory."""
    prefetch: bool
    """Whether the next unit's weights are gathered during the forward pass of this one."""


def shard(
    model: nn.Module,
    units: list[nn.Module],
    mesh: DeviceMesh,
    how: Sharding,
    *,
    exact: Sequence[nn.Module] = (),
    elsewhere: Sequence[tuple[nn.Module, DeviceMesh]] = (),
) -> None:
    """Shard parameters with FSDP2, unit by unit, in place.

    `mesh` has copies along `replicate` and parts along `shard`. `exact` are modules whose weights
    are never cast: units of their own, where others are. `elsewhere` are modules with a mesh of
    their own.
    """
    mixed = MixedPrecisionPolicy(param_dtype=how.compute, reduce_dtype=how.reduce)
    uncast = MixedPrecisionPolicy(reduce_dtype=how.reduce)
    apart = [module for module in exact if how.compute is not None and module not in units]
    # Without copies the one-dimensional mesh saves a collective per unit.
    mesh = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    pinned = torch.cuda.is_available()
    offload = CPUOffloadPolicy(pin_memory=pinned) if how.offload else OffloadPolicy()
    frees = how.kept == "nothing"
    for unit, its_mesh in elsewhere:
        fully_shard(
            unit,
            mesh=its_mesh["shard"],
            mp_policy=mixed,
            reshard_after_forward=frees,
            offload_policy=offload,
        )
    for unit in [*apart, *units]:
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=uncast if unit in exact else mixed,
            reshard_after_forward=frees,
            offload_policy=offload,
        )
    # The root is needed again first thing in backward; resharding it would only gather it twice.
    fully_shard(
        model, mesh=mesh, mp_policy=mixed, reshard_after_forward=False, offload_policy=offload
    )
    for module in _sharded_modules(model):
        # A factor of 1 with a forced sum is exact on NCCL and gloo alike, also on one rank.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if how.prefetch:
        # Modules are listed in the order they run in, which units written by name need not be.
        in_order = [module for module in _sharded_modules(model) if module is not model]
        for unit, following in pairwise(in_order):
            unit.set_modules_to_forward_prefetch([following])


class Sharded:
    """FSDP2 sums gradients by itself; it has to be told which backward pass is the last."""

    def __init__(self, parts: Sequence[nn.Module], kept: Kept) -> None:
        self._parts = [part for part in parts if isinstance(part, FSDPModule)]
        self._kept = kept

    def before(self, *, last: bool) -> None:
        """Gradients stay where they are, and unreduced, until the last pass."""
        for part in self._parts:
            part.set_requires_gradient_sync(last)
            part.set_is_last_backward(last)
            part.set_reshard_after_backward(last or self._kept != "step")

    def finish(self) -> None:
        """They were summed during the last pass."""


class Whole:
    """Every rank holds whole weights, and gradients are summed over those that share them."""

    def __init__(self, sums: Sequence[GradientSums]) -> None:
        """Those of weights with which other ranks compute too."""
        self._sums = sums

    def before(self, *, last: bool) -> None:
        """Gradients stay local until the last pass."""
        for sums in self._sums if last else ():
            sums.start()

    def finish(self) -> None:
        """Wait for the sums."""
        for sums in self._sums:
            sums.finish()


def _sharded_modules(model: nn.Module) -> Iterable[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
