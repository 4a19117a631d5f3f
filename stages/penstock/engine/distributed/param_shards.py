"""Parameter shards: which part of which checkpoint tensor a rank's parameter holds.

A rank holds boxes of full tensors: some rows, some columns, or, for fused projections, rows of
several tensors. Loading, checkpoints, export, the gradient norm and gradient sums all read these
tables, so none of them depends on a layout.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

GradReduceAxis = Literal["tensor", "kv"]
"""The ranks that hold copies: the whole tensor axis, or those with the same key-value heads."""


@dataclass(frozen=True)
class TensorShard:
    """A box of a checkpoint tensor, and the rows of the local tensor that hold it.

    If the local tensor has more dimensions than the box (stacked expert matrices), its leading
    dimensions are flattened into rows.
    """

    tensor: str
    """The name in a checkpoint: Hugging Face's, or the adapter's."""
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0
    """The first local row of the box; `sizes` gives the number of rows."""
    num_copies: int = 1
    """How many ranks of one pipeline stage's tensor axis, or stages, hold this same box."""
    grad_reduce: GradReduceAxis | None = None
    """The ranks over which the gradients of the copies must be summed; None: each is complete."""

    @property
    def num_rows(self) -> int:
        return self.sizes[0]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The box as a view of the local tensor."""
        first = local.dim() - len(self.sizes) + 1
        rows = math.prod(local.shape[:first])
        return local.view(rows, *local.shape[first:]).narrow(0, self.start, self.num_rows)

    def within(self, full: torch.Tensor) -> torch.Tensor:
        """The box as a view of the full tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            full = full.narrow(dim, offset, size)
        return full

    def restrict_rows(self, first: int, end: int) -> "TensorShard | None":
        """Restrict the shard to local rows `first` to `end`, which become the local tensor."""
        low, high = max(first, self.start), min(end, self.start + self.num_rows)
        if low >= high:
            return None
        return replace(
            self,
            offsets=(self.offsets[0] + low - self.start, *self.offsets[1:]),
            sizes=(high - low, *self.sizes[1:]),
            start=low - first,
        )


def full_shard(tensor: str, shape: Iterable[int]) -> TensorShard:
    """The shard that is a full tensor."""
    shape = tuple(shape)
    return TensorShard(tensor, shape, (0,) * len(shape), shape)


@dataclass(frozen=True)
class LocalParam:
    """One parameter of this rank, by its name in the model, and the checkpoint tensors it holds."""

    name: str
    parameter: nn.Parameter
    shards: tuple[TensorShard, ...]
    """The shards of the local part of the parameter, in order; empty if this rank holds no row."""
    replica_group: dist.ProcessGroup | None
    """The ranks that compute other tokens with the same part; None if there is no other."""

    @property
    def num_replicas(self) -> int:
        """The number of those ranks, this one included."""
        return 1 if self.replica_group is None else self.replica_group.size()

    @property
    def num_copies(self) -> int | None:
        """The number of ranks that hold the same part; None if it differs between shards."""
        copies = {shard.num_copies for shard in self.shards} or {1}
        return self.num_replicas * copies.pop() if len(copies) == 1 else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a tensor (a DTensor's local tensor, or the tensor itself)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_here(tensor: torch.Tensor, dims: int) -> tuple[int, int]:
    """First and end row of this rank's part of a tensor, whose dimensions but the last `dims - 1`
    are flattened into rows.
    """
    within = math.prod(tensor.shape[1 : tensor.dim() - dims + 1])
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] * within
    # Private: torch 2.13 has no public function for the offsets of a shard.
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # FSDP2 shards as `chunk` does, so the last ranks may have no rows.
    if not math.prod(shape):
        return 0, 0
    return offset[0] * within, (offset[0] + shape[0]) * within


def make_local_param(
    name: str,
    parameter: nn.Parameter,
    shards: Iterable[TensorShard],
    *,
    replica_group: dist.ProcessGroup | None = None,
) -> LocalParam:
    """Build a LocalParam from the shards before FSDP; `replica_group` as in LocalParam."""
    shards = tuple(shards)
    if isinstance(parameter, DTensor) and shards:
        first, end = rows_here(parameter, len(shards[0].sizes))
        cut = [shard.restrict_rows(first, end) for shard in shards]
        shards = tuple(shard for shard in cut if shard)
    return LocalParam(name, parameter, shards, replica_group)
