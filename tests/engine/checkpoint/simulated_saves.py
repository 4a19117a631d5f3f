"""Saves of many ranks in one process: what each of them does, one after another.

A mesh of pipeline stages, replicas, shards and tensor ranks holds boxes as FSDP2 and tensor
parallelism cut them. The peer is DCP's own planner, with an item for each box.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter

from penstock.engine.checkpoint.dcp_io import Boxes, ShardView
from penstock.engine.checkpoint.dcp_writer import BoxSavePlanner, BoxWriter

BoxData = Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""The data of a box from the tensor's name, the offsets and the sizes."""


@dataclass(frozen=True)
class Mesh:
    """Numbers of ranks."""

    stages: int = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.stages * self.replicas * self.shards * self.tensor

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shards)
        stage, replica = divmod(rank, self.replicas)
        return stage, replica, shard, tensor


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model."""

    shape: tuple[int, ...]
    split: int | None = None
    """The dimension that tensor parallelism cuts; None: each tensor rank has all of it."""
    stages: tuple[int, ...] = (0,)
    """The pipeline stages that hold it."""
    pieces: int = 1
    """Into how many boxes a rank's rows are cut."""


def boxes_of(
    rank: int, mesh: Mesh, tensors: Mapping[str, Tensor], data: BoxData
) -> dict[str, list[ShardView]]:
    """What a rank holds, by name."""
    stage, _, shard, tensor_rank = mesh.coordinates(rank)
    boxes: dict[str, list[ShardView]] = {}
    for name, tensor in sorted(tensors.items()):
        if stage not in tensor.stages:
            continue
        offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
        if tensor.split is not None:
            sizes[tensor.split] //= mesh.tensor
            offsets[tensor.split] = tensor_rank * sizes[tensor.split]
        if not sizes:
            boxes[name] = [ShardView((), (), data(name, (), ()))]
            continue
        # As `torch.chunk`, so that the last ranks may have no rows.
        rows = -(-sizes[0] // mesh.shards)
        first, end = (min(index * rows, sizes[0]) for index in (shard, shard + 1))
        height = max(1, -(-(end - first) // tensor.pieces))
        for start in range(first, end, height):
            at = (offsets[0] + start, *offsets[1:])
            size = (min(height, end - start), *sizes[1:])
            boxes.setdefault(name, []).append(ShardView(tensor.shape, at, data(name, at, size)))
    return boxes


class TorchSavePlanner(DefaultSavePlanner):
    """DCP's plans of boxes."""

    def __init__(self, boxes: Boxes) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = {
            MetadataIndex(name, box.offsets): box for name, parts in boxes.items() for box in parts
        }

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        box.chunk, TensorProperties(dtype=box.dtype), torch.Size(box.full_shape)
                    ),
                )
                for index, box in self.boxes.items()
            ]
        )

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        box = self.boxes[index]
        return box.data.to(box.dtype)


class TorchWriter(FileSystemWriter):
    """DCP's writer, with neither this machine's path nor a random id in its files."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=None, save_id=None)


def torch_rank(boxes: Boxes, folder: Path) -> tuple[SavePlanner, StorageWriter]:
    return TorchSavePlanner(boxes), TorchWriter(folder, per_thread_copy_ahead=0)


def our_rank(boxes: Boxes, folder: Path) -> tuple[SavePlanner, StorageWriter]:
    planner = BoxSavePlanner(boxes)
    return planner, BoxWriter(folder, planner)


def save(ranks: Sequence[tuple[SavePlanner, StorageWriter]]) -> None:
    """What `dcp.save` has these ranks do."""
    plans: list[SavePlan] = []
    for rank, (planner, writer) in enumerate(ranks):
        planner.set_up_planner({}, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    planner, writer = ranks[0]
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results: list[Any] = []
    for (planner, writer), plan in zip(ranks, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    ranks[0][1].finish(metadata, results)
