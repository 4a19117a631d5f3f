"""Which part of which tensor of a checkpoint a rank's own tensor is.

A rank holds boxes of whole tensors: some rows, some columns, or, where projections are fused, rows
of several. Loading, checkpoints, export, the gradient norm and sums of gradients all read these
tables, so none of them knows any layout.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Shared = Literal["tensor", "kv"]
"""Ranks among which copies lie: all of the tensor axis, or those that hold the same key heads."""


@dataclass(frozen=True)
class TensorShard:
    """A box of a checkpoint's tensor, and the rows of a local tensor that are it.

    Rows of a local tensor that has more dimensions than the box, such as one of many experts'
    matrices, are those of its first dimensions together.
    """

    tensor: str
    """Its name in a checkpoint: Hugging Face's, or an adapter's own."""
    whole: tuple[int, ...]
    """The shape of all of it."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0
    """The local tensor's first row that belongs to it; as many as `sizes` says follow."""
    copies: int = 1
    """Ranks of one pipeline stage's tensor axis, or stages, that hold this very box."""
    summed: Shared | None = None
    """Among which ranks the gradients of the copies are parts of a sum; None: each is whole."""

    @property
    def rows(self) -> int:
        """Rows of the local tensor."""
        return self.sizes[0]

    @property
    def numel(self) -> int:
        """Numbers in the box."""
        return math.prod(self.sizes)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box itself: a view of the local tensor."""
        first = local.dim() - len(self.sizes) + 1
        rows = math.prod(local.shape[:first])
        return local.view(rows, *local.shape[first:]).narrow(0, self.start, self.rows)

    def within(self, first: int, end: int) -> "TensorShard | None":
        """What is left of it in local rows `first` to `end`, which become the local tensor."""
        low, high = max(first, self.start), min(end, self.start + self.rows)
        if low >= high:
            return None
        return replace(
            self,
            offsets=(self.offsets[0] + low - self.start, *self.offsets[1:]),
            sizes=(high - low, *self.sizes[1:]),
            start=low - first,
        )


def whole_piece(tensor: str, shape: Iterable[int]) -> TensorShard:
    """All of a tensor."""
    shape = tuple(shape)
    return TensorShard(tensor, shape, (0,) * len(shape), shape)


@dataclass(frozen=True)
class LocalParam:
    """One parameter of this rank, and what it is."""

    name: str
    """Its name in the model."""
    parameter: nn.Parameter
    pieces: tuple[TensorShard, ...]
    """Of the local part of the parameter, in order; none where this rank holds no row."""
    copying: dist.ProcessGroup | None
    """Ranks that compute other tokens with the very same part; None where no other does."""

    @property
    def replicas(self) -> int:
        """How many they are, this one included."""
        return 1 if self.copying is None else self.copying.size()

    @property
    def copies(self) -> int | None:
        """Ranks that hold the same; None if that differs from piece to piece."""
        found = {piece.copies for piece in self.pieces} or {1}
        return self.replicas * found.pop() if len(found) == 1 else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_here(tensor: torch.Tensor, dims: int) -> tuple[int, int]:
    """First and end of this rank's rows of a tensor, which is seen as one of `dims` dimensions:
    rows are those of all its others and the first of these together."""
    within = math.prod(tensor.shape[1 : tensor.dim() - dims + 1])
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] * within
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if not math.prod(shape):
        return 0, 0
    return offset[0] * within, (offset[0] + shape[0]) * within


def make_local_param(
    name: str,
    parameter: nn.Parameter,
    pieces: Iterable[TensorShard],
    *,
    copying: dist.ProcessGroup | None = None,
) -> LocalParam:
    """`pieces` of the tensor before it was sharded; `copying` as in Held."""
    pieces = tuple(pieces)
    if isinstance(parameter, DTensor) and pieces:
        pieces = tuple(_within(pieces, *rows_here(parameter, len(pieces[0].sizes))))
    return LocalParam(name, parameter, pieces, copying)


def _within(pieces: Iterable[TensorShard], first: int, end: int) -> Iterator[TensorShard]:
    for piece in pieces:
        if part := piece.within(first, end):
            yield part
