"""Classes of tensors that all ranks hold in the same way.

A model repeats its layers, and optimizer states are sharded as their parameters: of thousands of
tensors few differ in anything but the name. What is computed for one tensor of a class holds for
all of them.

Dimension letters: R ranks of a table, K boxes of each of them, N tensors of a class, B distinct
boxes of a tensor, H pairs of a rank and a box that it holds, D dimensions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.engine.checkpoint.local_plan import HeldTensor, LocalPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RankTable:
    """Ranks that hold equally many boxes of the same tensors."""

    ranks: Ints
    """R ranks, ascending."""
    tensors: Sequence[HeldTensor]
    boxes: Ints
    """A row for each rank: the offsets and the sizes of each box, tensor by tensor."""
    items: Ints
    """R x K: the number of each box among those of all ranks."""


@dataclass(frozen=True)
class TensorClass:
    """Tensors of the same dtype and shape of which each rank holds the same boxes."""

    names: Sequence[str]
    positions: Sequence[int]
    """The position of each tensor among all of the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Ints
    """B x 2 x D: offsets and sizes of the distinct boxes, in the order of the first rank that holds
    each."""
    holding_ranks: Ints
    """The rank of each of H pairs, ascending."""
    held_boxes: Ints
    """The box of each of H pairs; the boxes of a rank are in its order."""
    items: Ints
    """N x H: the number of each box among those of all tensors and ranks."""

    @property
    def box_bytes(self) -> list[int]:
        return [prod(sizes) * self.dtype.itemsize for sizes in self.boxes[:, 1].tolist()]

    def holders(self) -> list[list[int]]:
        """The ranks that hold each of the B boxes, ascending."""
        holders: list[list[int]] = [[] for _ in self.boxes]
        for rank, box in zip(self.holding_ranks.tolist(), self.held_boxes.tolist(), strict=True):
            holders[box].append(rank)
        return holders


class _Part(NamedTuple):
    """The boxes of a tensor on the ranks of a table."""

    table: int
    tensor: HeldTensor
    items: slice
    """Columns of `RankTable.items`."""
    columns: slice
    """Columns of `RankTable.boxes`."""


def rank_tables(plans: Sequence[LocalPlan]) -> list[RankTable]:
    """The ranks by the tensors they hold; the table of rank 0 is first."""
    ranks_by_tensors: dict[bytes, list[int]] = {}
    for rank, plan in enumerate(plans):
        ranks_by_tensors.setdefault(plan.tensors, []).append(rank)
    tables: list[RankTable] = []
    start = 0
    for ranks in ranks_by_tensors.values():
        tensors = plans[ranks[0]].read_tensors()
        shape = len(ranks), sum(tensor.num_boxes for tensor in tensors)
        items = np.arange(start, start + prod(shape)).reshape(shape)
        boxes = np.stack([plans[rank].read_boxes() for rank in ranks])
        tables.append(RankTable(np.array(ranks), tensors, boxes, items))
        start += prod(shape)
    return tables


def tensor_classes(tables: Sequence[RankTable]) -> list[TensorClass]:
    """The classes of all tensors. Raises ValueError if ranks differ in a tensor's dtype or
    shape."""
    parts_by_name: dict[str, list[_Part]] = {}
    for part in _parts(tables):
        parts_by_name.setdefault(part.tensor.name, []).append(part)
    members: dict[Any, list[tuple[int, Sequence[_Part]]]] = {}
    for position, (name, parts) in enumerate(parts_by_name.items()):
        form = parts[0].tensor[1:3]
        if any(part.tensor[1:3] != form for part in parts):
            raise ValueError(f"ranks hold {name} in several dtypes or shapes")
        boxes = [
            (part.table, part.tensor.num_boxes, tables[part.table].boxes[:, part.columns].tobytes())
            for part in parts
        ]
        members.setdefault((form, *boxes), []).append((position, parts))
    return [_class_of(tables, tensors) for tensors in members.values()]


def _parts(tables: Sequence[RankTable]) -> Iterator[_Part]:
    for number, table in enumerate(tables):
        item = column = 0
        for tensor in table.tensors:
            end = column + 2 * len(tensor.shape) * tensor.num_boxes
            items = slice(item, item + tensor.num_boxes)
            yield _Part(number, tensor, items, slice(column, end))
            item, column = items.stop, end


def _class_of(
    tables: Sequence[RankTable], tensors: Sequence[tuple[int, Sequence[_Part]]]
) -> TensorClass:
    first = tensors[0][1][0].tensor
    ranks, boxes, items = [], [], []
    # The parts of all tensors lie in the same tables.
    for parts in zip(*(parts for _, parts in tensors), strict=True):
        table, count = tables[parts[0].table], parts[0].tensor.num_boxes
        ranks.append(np.repeat(table.ranks, count))
        shape = len(table.ranks) * count, 2, len(first.shape)
        boxes.append(table.boxes[:, parts[0].columns].reshape(shape))
        items.append(np.stack([table.items[:, part.items].ravel() for part in parts]))
    all_ranks = np.concatenate(ranks)
    # A rank is in one table, so its boxes stay in order.
    order_H = np.argsort(all_ranks, kind="stable")
    boxes_H2D = np.concatenate(boxes)[order_H]
    numbers: dict[bytes, int] = {}
    boxes_H = np.array([numbers.setdefault(box.tobytes(), len(numbers)) for box in boxes_H2D])
    _, first_pairs_B = np.unique(boxes_H, return_index=True)
    return TensorClass(
        names=[parts[0].tensor.name for _, parts in tensors],
        positions=[position for position, _ in tensors],
        dtype=first.dtype,
        shape=first.shape,
        boxes=boxes_H2D[first_pairs_B],
        holding_ranks=all_ranks[order_H],
        held_boxes=boxes_H,
        items=np.concatenate(items, axis=1)[:, order_H],
    )
