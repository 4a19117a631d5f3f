"""Boxes of tensors, written to and read from DCP's files.

A rank's part of a tensor may be several boxes, and several ranks may hold the same one; DCP's own
planners know a tensor of one box. What is written names tensors alone, never ranks: a checkpoint
is read by whatever boxes its reader holds.
"""

import io
import math
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.core.cache.folder_digests import Digester, FileDigest
from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles


@dataclass(frozen=True)
class ShardView:
    """A box of a tensor of this shape; `data` is written, or read into in place."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor
    rounded_to: torch.dtype | None = None
    """What it is written in; None: as it is."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers in the file."""
        return self.rounded_to or self.data.dtype

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """What DCP calls a box."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.data.size())


Boxes = Mapping[str, Sequence[ShardView]]
"""By the name of the tensor in the checkpoint."""


def whole_box(tensor: torch.Tensor) -> ShardView:
    """All of a tensor."""
    return ShardView(tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def write_boxes(
    boxes: Boxes, folder: Path, group: dist.ProcessGroup | None
) -> dict[str, FileDigest]:
    """Write what all ranks of the group hold; every one of them calls it. The digests of the files
    that this rank wrote, by their names.

    A box that several ranks hold is written by one of them, so that all write about as much.
    """
    writer = _Writer(folder)
    dcp.save(dict(boxes), storage_writer=writer, planner=_Saving(), process_group=group)
    return writer.files.digests


def read_boxes(boxes: Boxes, files: CheckpointFiles) -> None:
    """Read into the boxes in place; ranks need not agree on what they read.

    Raises ArtifactError when the checkpoint lacks a tensor, holds another shape of it, or not all,
    or when its files are damaged; some of the boxes are read then.
    """
    found = files.read_metadata().state_dict_metadata
    reads: list[ReadItem] = []
    for name, parts in boxes.items():
        entry = found.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise _other_model(files, f"lacks {name}")
        there = tuple(entry.size)
        if wrong := [box.whole for box in parts if box.whole != there]:
            fault = f"holds {name} as {there}, and the model makes it {wrong[0]}"
            raise _other_model(files, fault)
        reads += _reads(files, name, entry, parts)
    with warnings.catch_warnings():
        # Each rank knows alone what it reads, and the library warns of it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(boxes), storage_reader=files, planner=_Loading(reads), no_dist=True)
        except CheckpointException as error:
            # It is no Exception, which processes expect of whatever fails.
            raise ArtifactError(
                f"The checkpoint {files.folder} cannot be read: {first_rank_error(error)}.\n"
                "  Take another checkpoint of the run."
            ) from error


def first_rank_error(error: BaseException) -> BaseException:
    """The first rank's error, of one that speaks for all ranks."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _reads(
    files: CheckpointFiles, name: str, entry: TensorStorageMetadata, parts: Sequence[ShardView]
) -> list[ReadItem]:
    """Which part of which stored box goes where."""
    reads = create_read_items_for_chunk_list(name, entry, [box.chunk for box in parts])
    wanted = sum(box.data.numel() for box in parts)
    found = sum(math.prod(read.lengths) for read in reads)
    if found != wanted:
        raise ArtifactError(
            f"The checkpoint {files.folder} holds {found} of {wanted} numbers of {name}.\n"
            "  Take another checkpoint of the run."
        )
    return reads


def _other_model(files: CheckpointFiles, fault: str) -> ArtifactError:
    return ArtifactError(
        f"The checkpoint {files.folder} {fault}.\n"
        "  It belongs to another model.model_path or model.config_path."
    )


class _Saving(DefaultSavePlanner):
    """Plans for boxes what DCP's planner plans for tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """This rank's boxes, each once; the coordinator drops what others write."""
        items = [_write_item(name, box) for name, parts in self.state_dict.items() for box in parts]
        return SavePlan(list({item.index: item for item in items}.values()))

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The data of the box that is written."""
        parts: Sequence[ShardView] = self.state_dict[index.fqn]
        box = next(box for box in parts if torch.Size(box.offsets) == index.offset)
        return box.data.to(box.dtype)


class _Loading(DefaultLoadPlanner):
    """A plan that is made, and boxes to carry it out on."""

    def __init__(self, reads: Sequence[ReadItem]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._reads = list(reads)

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Note what is read into."""
        self.state_dict = dict(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The reads."""
        return LoadPlan(self._reads)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The data of the box that is read."""
        assert index.index is not None
        # By number: two parameters of one rank may be the same box.
        return self.state_dict[index.fqn][index.index].data


def _write_item(name: str, box: ShardView) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, box.offsets),
        # A shard, also where it is all of the tensor: ranks may hold the same.
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=box.chunk,
            # Not those of the data in memory: where they lay must not change the file.
            properties=TensorProperties(dtype=box.dtype),
            size=torch.Size(box.whole),
        ),
    )


class _Writer(FileSystemWriter):
    """DCP's file writer, whose files are the same bytes for the same content."""

    def __init__(self, path: Path) -> None:
        # Without copying ahead, which begins with the smallest tensors only where there is CUDA,
        # and which in a thread of its own would take up memory on another rank's device.
        super().__init__(path, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self.fs = self.files = _DigestedFiles()

    def storage_meta(self) -> StorageMeta:
        # The default records this machine's path and a random id.
        return StorageMeta(checkpoint_id=None, save_id=None)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes. Raises OSError where the system refuses bytes."""
        try:
            return super().write_data(plan, planner)
        except (RuntimeError, OSError) as error:
            # Of a failed write torch says only that its archive has another length, and closing the
            # file fails once more.
            if self.files.refused:
                raise self.files.refused from error
            raise


class _DigestedFiles(FileSystem):
    """Files of which digests are computed while they are written, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, FileDigest] = {}
        self.refused: OSError | None = None
        """Why bytes could not be written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """The file, open in this mode."""
        with super().create_stream(path, mode) as raw:
            if mode != "wb":
                yield raw
                return
            stream = _DigestedStream(cast("BinaryIO", raw), self, path)
            yield cast("io.IOBase", stream)
            self.digests[Path(path).name] = stream.digester.result()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The digest goes with the file."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _DigestedStream:
    """A file that is written from its beginning to its end."""

    def __init__(self, raw: BinaryIO, files: _DigestedFiles, path: str | os.PathLike[str]) -> None:
        self._raw, self._files, self._path = raw, files, path
        self.digester = Digester()
        self.tell, self.fileno, self.close = raw.tell, raw.fileno, raw.close

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Raises OSError that names the file."""
        with self._noted():
            count = self._raw.write(data)
        self.digester.update(data)
        return count

    def flush(self) -> None:
        """Raises OSError that names the file."""
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
