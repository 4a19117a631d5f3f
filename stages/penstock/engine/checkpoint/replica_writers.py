"""Which rank writes a box that several ranks hold: ranks write about as many bytes each.

Boxes held by the same ranks are distributed together, the largest first, each to the rank that
writes least so far. Dimension letters as in `tensor_classes.py`.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.checkpoint.tensor_classes import Ints, TensorClass


class _Copies(NamedTuple):
    """Boxes of the tensors of a class that the same ranks hold."""

    positions: Sequence[int]
    """The position of each of N tensors."""
    bytes: tuple[int, ...]
    """The size of each box of one tensor."""


class _Pattern(NamedTuple):
    """Which of several ranks writes which boxes."""

    writers: Mapping[int, Ints]
    """By class: N x boxes."""
    loads: Ints
    """The bytes of each rank."""


def choose_writers(classes: Sequence[TensorClass], num_ranks: int) -> list[Ints]:
    """For each class the rank that writes each of B boxes of N tensors, N x B."""
    writers: list[Ints] = []
    loads = np.zeros(num_ranks, np.int64)
    boxes_by_ranks: dict[tuple[int, ...], dict[int, list[int]]] = {}
    sizes = [tensors.box_bytes for tensors in classes]
    for number, tensors in enumerate(classes):
        first_B = np.empty(len(tensors.boxes), np.int64)
        for box, (ranks, size) in enumerate(zip(tensors.holders(), sizes[number], strict=True)):
            first_B[box] = ranks[0]
            if len(ranks) == 1:
                loads[ranks[0]] += size * len(tensors.names)
            else:
                boxes_by_class = boxes_by_ranks.setdefault(tuple(ranks), {})
                boxes_by_class.setdefault(number, []).append(box)
        writers.append(np.tile(first_B, (len(tensors.names), 1)))
    # Most sets of ranks hold alike boxes: each data-parallel shard has the same replicas.
    patterns: dict[Any, _Pattern] = {}
    # The smallest sets first: larger ones have more ranks to even out what these leave.
    for ranks, boxes_by_class in sorted(boxes_by_ranks.items(), key=lambda item: len(item[0])):
        copies = {
            number: _Copies(classes[number].positions, tuple(sizes[number][box] for box in boxes))
            for number, boxes in boxes_by_class.items()
        }
        ranks_array = np.array(ranks)
        rank_loads = loads[ranks_array] - loads[ranks_array].min()
        key = tuple((number, own.bytes) for number, own in copies.items()), rank_loads.tobytes()
        if key not in patterns:
            patterns[key] = _distribute(copies, rank_loads)
        for number, boxes in boxes_by_class.items():
            writers[number][:, boxes] = ranks_array[patterns[key].writers[number]]
        loads[ranks_array] += patterns[key].loads
    return writers


def _distribute(copies: Mapping[int, _Copies], loads: Ints) -> _Pattern:
    """Distribute boxes among ranks with these loads."""
    writers = {
        number: np.empty((len(own.positions), len(own.bytes)), np.int64)
        for number, own in copies.items()
    }
    boxes = sorted(
        (-size, position, number, tensor, box)
        for number, own in copies.items()
        for tensor, position in enumerate(own.positions)
        for box, size in enumerate(own.bytes)
    )
    heap = [(load, index) for index, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    added = np.zeros(len(loads), np.int64)
    for negative_size, _, number, tensor, box in boxes:
        load, index = heap[0]
        writers[number][tensor, box] = index
        added[index] -= negative_size
        heapq.heapreplace(heap, (load - negative_size, index))
    return _Pattern(writers, added)
