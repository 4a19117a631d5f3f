"""Device mesh: ranks as a grid of parallel dimensions, and the process groups along its axes.

This is the only file that decides the position of a rank. Ranks along the last axis are adjacent
and communicate most; those along the first axis communicate least.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.engine.distributed.parallel_dims import ParallelDims

Axis = Literal["pipeline", "replicate", "shard", "ring", "ulysses", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""The axes, outermost first."""

CpFsdpMode = Literal["all", "ulysses_only", "ring_only", "none"]
"""Which context-parallel axes also shard the weights (`train.cp_fsdp_mode`)."""

FOLDED_AXES: dict[CpFsdpMode, tuple[Axis, ...]] = {
    "all": ("ring", "ulysses"),
    "ulysses_only": ("ulysses",),
    "ring_only": ("ring",),
    "none": (),
}

Placement = Literal["adjacent", "strided"]
"""Which ranks form an expert-parallel group (`train.ep_outside`)."""

DATA_AXES: tuple[Axis, ...] = ("replicate", "shard", "ring", "ulysses")
"""Axes whose ranks compute other tokens with the same weights; gradients are summed over them."""


class Mesh:
    """The device mesh from the view of one rank. Creating a process group is collective, so every
    rank must request the same groups in the same order.
    """

    def __init__(
        self,
        dims: ParallelDims,
        rank: int,
        device_type: str,
        *,
        experts: Placement = "adjacent",
    ) -> None:
        """The world size must be the product of the degrees. Experts are sharded over `adjacent`
        ranks, or over `strided` ones: ranks as far apart as possible.
        """
        self._placement: Placement = experts
        self.dims, self.rank, self.device_type = dims, rank, device_type
        # Rank numbers, [pipeline, replicate, shard, ring, ulysses, tensor].
        self._grid = torch.arange(dims.world_size).reshape([self.size(axis) for axis in AXES])
        coords = (self._grid == rank).nonzero()[0].tolist()
        self._coords: dict[Axis, int] = dict(zip(AXES, coords, strict=True))
        self._meshes: dict[object, DeviceMesh] = {}

    def size(self, *axes: Axis) -> int:
        return math.prod(getattr(self.dims, axis) for axis in axes)

    def index(self, *axes: Axis) -> int:
        """This rank's index among those that differ from it in these axes only."""
        flat_index = 0
        for axis in axes:
            flat_index = flat_index * self.size(axis) + self._coords[axis]
        return flat_index

    def ranks(self, axis: Axis) -> list[int]:
        """The ranks that differ from this one in this axis only, in the order of `index`."""
        coords = self._coords
        return self._grid[tuple(slice(None) if a == axis else coords[a] for a in AXES)].tolist()

    def group(self, *axes: Axis) -> dist.ProcessGroup | None:
        """The process group of the ranks that differ from this one in these axes only; None if
        this rank is the only one."""
        return self._by_axes([axes], ("0",)).get_group("0") if self.size(*axes) > 1 else None

    def adjacent_group(self, count: int) -> dist.ProcessGroup | None:
        """The group of `count` consecutive ranks along `tensor` that includes this rank; None for
        one. `count` must divide the size of the axis.
        """
        if count == 1:
            return None
        assert self.size("tensor") % count == 0, f"{count} of {self.size('tensor')} ranks"
        mesh = self._mesh(("adjacent", count), ("adjacent",), lambda: self._grid.reshape(-1, count))
        return mesh.get_group("adjacent")

    def fsdp_mesh(self, folding: CpFsdpMode) -> DeviceMesh:
        """The weight mesh: replicas along `replicate`, shards along `shard` (HSDP)."""
        shard: tuple[Axis, ...] = ("shard", *FOLDED_AXES[folding])
        replicate: tuple[Axis, ...] = tuple(axis for axis in DATA_AXES if axis not in shard)
        names = ("replicate", "shard")
        return self._by_axes([replicate, shard], names)["replicate", "shard"]

    def expert_mesh(self) -> DeviceMesh:
        """The expert mesh of this pipeline stage: `expert` ranks share a layer's experts; `shard`
        ranks hold the same experts and shard their weights.
        """

        def grid() -> torch.Tensor:
            stages = self._grid.reshape(self.size("pipeline"), -1)
            count = self.dims.expert
            if self._placement == "adjacent":
                # Axes: stage, 1, shard, expert.
                return stages.reshape(len(stages), 1, -1, count)
            return stages.reshape(len(stages), 1, count, -1).transpose(2, 3).contiguous()

        return self._mesh("experts", ("replicate", "shard", "expert"), grid)

    @property
    def shards_experts_separately(self) -> bool:
        """Whether experts are sharded differently from the other weights."""
        return self.dims.expert > 1 or self.dims.tensor > 1

    def _by_axes(self, parts: Sequence[tuple[Axis, ...]], names: tuple[str, ...]) -> DeviceMesh:
        """The grid reshaped to one axis per part, after one of all remaining axes."""

        def grid() -> torch.Tensor:
            other_axes: tuple[Axis, ...] = tuple(
                axis for axis in AXES if not any(axis in part for part in parts)
            )
            order = [AXES.index(axis) for part in (other_axes, *parts) for axis in part]
            return self._grid.permute(order).reshape(
                [self.size(*part) for part in (other_axes, *parts)]
            )

        return self._mesh((tuple(parts), names), names, grid)

    def _mesh(
        self, key: object, names: tuple[str, ...], grid: Callable[[], torch.Tensor]
    ) -> DeviceMesh:
        # Each DeviceMesh would create its process groups anew.
        if key not in self._meshes:
            self._meshes[key] = DeviceMesh(
                self.device_type, grid(), mesh_dim_names=("rest", *names)
            )
        return self._meshes[key]
