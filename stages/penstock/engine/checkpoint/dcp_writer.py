"""Write boxes of tensors with torch.distributed.checkpoint (DCP).

Ranks exchange no plans of DCP's, which have objects for each box of each rank, but what those are
made from: hundreds of megabytes less for a large model on many ranks.
"""

import io
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, compress, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.core.cache.folder_digests import Digester, FileDigest
from penstock.engine.checkpoint.dcp_io import Boxes
from penstock.engine.checkpoint.dcp_metadata import RankFile, pickled_metadata
from penstock.engine.checkpoint.global_plan import GlobalPlan, plan_globally
from penstock.engine.checkpoint.local_plan import (
    BoxShape,
    HeldTensor,
    LocalPlan,
    pack_integers,
    unpack_integers,
)
from penstock.engine.checkpoint.safe_dcp_reader import METADATA


def write_boxes(
    boxes: Boxes, folder: Path, group: dist.ProcessGroup | None
) -> dict[str, FileDigest]:
    """Write what all ranks of the group hold. Collective. Returns the digests of the files that
    this rank wrote, by name.

    A box that several ranks hold is written by one of them, so that all write about as much.
    """
    planner = BoxSavePlanner(boxes)
    writer = BoxWriter(folder, planner)
    dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    return writer.files.digests


class BoxSavePlanner(SavePlanner):
    """Save planner for boxes instead of DCP's one box per tensor."""

    def __init__(self, boxes: Boxes) -> None:
        # By offsets, as two parameters of a rank may be the same box.
        self._boxes = {
            name: {box.offsets: box for box in parts} for name, parts in boxes.items() if parts
        }
        self.global_plan: GlobalPlan | None = None
        """On rank 0, from when it is made."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: the boxes are known."""

    def create_local_plan(self) -> SavePlan:
        held = {
            HeldTensor(name, box.dtype, box.full_shape, len(parts)): [
                BoxShape(part.offsets, tuple(part.data.shape)) for part in parts.values()
            ]
            for name, parts in self._boxes.items()
            for box in islice(parts.values(), 1)
        }
        return SavePlan([], planner_data=LocalPlan.of(held))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan = plan_globally([plan.planner_data for plan in all_plans])
        plans = [
            SavePlan([], planner_data=np.packbits(plan.is_written))
            for plan in self.global_plan.ranks
        ]
        # All ranks receive the metadata, which only rank 0 needs.
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        boxes = [(name, box) for name, parts in self._boxes.items() for box in parts.values()]
        is_written = np.unpackbits(new_plan.planner_data, count=len(boxes))
        items = [
            WriteItem(
                index=MetadataIndex(name, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    box.chunk, TensorProperties(dtype=box.dtype), torch.Size(box.full_shape)
                ),
            )
            for name, box in compress(boxes, is_written)
        ]
        return replace(new_plan, items=items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = write_item.index
        assert index.offset is not None
        box = self._boxes[index.fqn][tuple(index.offset)]
        return box.data.to(box.dtype)


class BoxWriter(FileSystemWriter):
    """DCP's file writer with deterministic files: the same content gives the same bytes."""

    def __init__(self, path: Path, planner: BoxSavePlanner) -> None:
        # No copy-ahead: it starts with the smallest tensors only on CUDA, and its thread would
        # allocate memory on another rank's device.
        # `sync_files` calls fsync on each file before the manager publishes the folder.
        super().__init__(path, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        # The base class writes through `fs`, so digests need no second pass over the files.
        self.fs = self.files = _DigestedFiles()
        self._planner = planner

    def storage_meta(self) -> StorageMeta:
        # The default stores this machine's path and a random id.
        return StorageMeta(checkpoint_id=None, save_id=None)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the boxes. The result has the length of each in the place of DCP's results."""
        try:
            results = super().write_data(plan, planner).wait()
        except (RuntimeError, OSError) as error:
            # For a failed write torch only reports a wrong archive length, and closing the file
            # fails again.
            if self.files.refused:
                raise self.files.refused from error
            raise
        future: Future[Any] = Future()
        future.set_result(_compact(results))
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write `.metadata`, on rank 0."""
        del metadata
        plan = self._planner.global_plan
        assert plan is not None
        files = [RankFile(name, unpack_integers(lengths)) for name, lengths in results]
        path = self.fs.concat_path(self.path, METADATA)
        part = self.fs.concat_path(self.path, f"{METADATA}.tmp")
        with self.fs.create_stream(part, "wb") as stream:
            for piece in pickled_metadata(plan, files, self.storage_meta()):
                stream.write(piece)
            os.fsync(stream.fileno())
        self.fs.rename(part, path)


def _compact(results: Sequence[WriteResult]) -> tuple[str, bytes]:
    """The name of a rank's file, and the lengths of the boxes in it."""
    infos = [result.storage_data for result in results]
    ends = accumulate((info.length for info in infos), initial=0)
    assert all(info.offset == end for info, end in zip(infos, ends, strict=False))
    name = infos[0].relative_path if infos else ""
    return name, pack_integers(info.length for info in infos)


class _DigestedFiles(FileSystem):
    """A file system that computes digests while writing, by file name."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, FileDigest] = {}
        self.refused: OSError | None = None
        """The error of a failed write."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            if mode != "wb":
                yield raw
                return
            stream = _DigestedStream(cast("BinaryIO", raw), self, path)
            yield cast("io.IOBase", stream)
            self.digests[Path(path).name] = stream.digester.result()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        # DCP writes `.metadata` under another name first.
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _DigestedStream:
    """A file that is written sequentially."""

    def __init__(self, raw: BinaryIO, files: _DigestedFiles, path: str | os.PathLike[str]) -> None:
        self._raw, self._files, self._path = raw, files, path
        self.digester = Digester()
        self.tell, self.fileno, self.close = raw.tell, raw.fileno, raw.close

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write and update the digest. Raises OSError that names the file."""
        with self._noted():
            count = self._raw.write(data)
        self.digester.update(data)
        return count

    def flush(self) -> None:
        with self._noted():
            self._raw.flush()

    @contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            error.filename = os.fspath(self._path)
            self._files.refused = error
            raise
