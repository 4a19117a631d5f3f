"""The global save plan: which rank writes which box, and the metadata of all tensors.

Dimension letters as in `tensor_classes.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.engine.checkpoint.local_plan import LocalPlan
from penstock.engine.checkpoint.replica_writers import choose_writers
from penstock.engine.checkpoint.tensor_classes import (
    Ints,
    TensorClass,
    rank_tables,
    tensor_classes,
)

NOT_WRITTEN = -1


class RankPlan(NamedTuple):
    """The plan of one rank, which holds K boxes."""

    tensors: Ints
    """The position of each box's tensor in `GlobalPlan.tensors`."""
    chunks: NDArray[np.int32]
    """The position of each box among its tensor's chunks, if this rank writes it; else
    NOT_WRITTEN."""
    offsets: NDArray[np.int32]
    """The position of each box's offsets in `GlobalPlan.offsets`."""

    @property
    def is_written(self) -> NDArray[np.bool_]:
        return self.chunks != NOT_WRITTEN


@dataclass(frozen=True)
class GlobalPlan:
    """The plan of all ranks."""

    tensors: dict[str, TensorStorageMetadata]
    """By name. Tensors that are written in the same way share one list of chunks."""
    offsets: list[torch.Size]
    """Those of the chunks, the same objects."""
    ranks: list[RankPlan]


def plan_globally(plans: Sequence[LocalPlan]) -> GlobalPlan:
    """The global plan from the plans of all ranks. Depends on nothing else.

    Raises ValueError if boxes of a tensor overlap or are not within it, if several ranks hold less
    than all of a tensor, or if they differ in its dtype or shape.
    """
    tables = rank_tables(plans)
    classes = tensor_classes(tables)
    num_items = sum(table.items.size for table in tables)
    chunks, offset_numbers = np.empty(num_items, np.int32), np.empty(num_items, np.int32)
    metadata: dict[str, TensorStorageMetadata] = {}
    offsets: list[torch.Size] = []
    for tensors, writers_NB in zip(classes, choose_writers(classes, len(plans)), strict=True):
        _require_valid(tensors, is_whole=len(plans) > 1)
        is_written_NH = writers_NB[:, tensors.held_boxes] == tensors.holding_ranks
        numbers_NH = np.cumsum(is_written_NH, axis=1) - 1
        chunks[tensors.items] = np.where(is_written_NH, numbers_NH, NOT_WRITTEN)
        offset_numbers[tensors.items] = len(offsets) + tensors.held_boxes
        chunks_B = [ChunkStorageMetadata(*map(torch.Size, box)) for box in tensors.boxes.tolist()]
        offsets += [chunk.offsets for chunk in chunks_B]
        metadata.update(_metadata_of(tensors, is_written_NH, chunks_B))
    # In the order of ranks and their boxes, as DCP's own planner has them.
    names = dict.fromkeys(tensor.name for table in tables for tensor in table.tensors)
    numbers = {name: number for number, name in enumerate(names)}
    rank_plans: dict[int, RankPlan] = {}
    for table in tables:
        tensors_K = np.array(
            [numbers[tensor.name] for tensor in table.tensors for _ in range(tensor.num_boxes)],
            np.int64,
        )
        for rank, items_K in zip(table.ranks.tolist(), table.items, strict=True):
            rank_plans[rank] = RankPlan(tensors_K, chunks[items_K], offset_numbers[items_K])
    ordered = {name: metadata[name] for name in names}
    return GlobalPlan(ordered, offsets, [rank_plans[rank] for rank in range(len(plans))])


def _metadata_of(
    tensors: TensorClass,
    is_written_NH: NDArray[np.bool_],
    chunks_B: Sequence[ChunkStorageMetadata],
) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """The metadata of each tensor, of which ranks write these boxes."""
    # Only the dtype: other properties in memory must not change the file.
    properties, size = TensorProperties(dtype=tensors.dtype), torch.Size(tensors.shape)
    written: dict[bytes, list[ChunkStorageMetadata]] = {}
    for name, is_written_H in zip(tensors.names, is_written_NH, strict=True):
        key = is_written_H.tobytes()
        if key not in written:
            written[key] = [chunks_B[box] for box in tensors.held_boxes[is_written_H].tolist()]
        yield name, TensorStorageMetadata(properties, size, written[key])


def _require_valid(tensors: TensorClass, *, is_whole: bool) -> None:
    """Raise ValueError unless the boxes are disjoint, within the tensor and, if asked, all of
    it."""
    name, shape = tensors.names[0], np.array(tensors.shape, np.int64)
    starts_BD, sizes_BD = tensors.boxes[:, 0], tensors.boxes[:, 1]
    ends_BD = starts_BD + sizes_BD
    if (starts_BD < 0).any() or (sizes_BD < 0).any() or (ends_BD > shape).any():
        raise ValueError(f"{name} has a box outside of its shape {tensors.shape}")
    if _overlap(starts_BD, ends_BD):
        raise ValueError(f"{name} has boxes that overlap")
    saved = sum(prod(sizes) for sizes in sizes_BD.tolist())
    if is_whole and saved != prod(tensors.shape):
        raise ValueError(f"ranks hold {saved} of {prod(tensors.shape)} numbers of {name}")


def _overlap(starts_BD: Ints, ends_BD: Ints) -> bool:
    count, dims = starts_BD.shape
    if count == 1 or not dims:
        return count > 1
    # Sorted by the dimension that separates most of them, a box can overlap only the next few.
    dim = max(range(dims), key=lambda dim: len(np.unique(starts_BD[:, dim])))
    order_B = np.argsort(starts_BD[:, dim], kind="stable")
    starts_BD, ends_BD = starts_BD[order_B], ends_BD[order_B]
    for distance in range(1, count):
        near = starts_BD[distance:, dim] < ends_BD[:-distance, dim]
        if not near.any():
            return False
        meets = (starts_BD[distance:] < ends_BD[:-distance]) & (
            starts_BD[:-distance] < ends_BD[distance:]
        )
        if meets.all(axis=1).any():
            return True
    return False
