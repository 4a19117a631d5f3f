"""Read and write boxes of tensors with torch.distributed.checkpoint (DCP).

A rank's part of a tensor may be several boxes, and several ranks may hold the same one; DCP's own
planners support one box per tensor. Files name tensors only, never ranks, so any layout can read a
checkpoint.
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
    """A box of a tensor with shape `full_shape`; `data` is written, or read into in place."""

    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor
    rounded_to: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return self.rounded_to or self.data.dtype

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.data.size())


Boxes = Mapping[str, Sequence[ShardView]]
"""Boxes by the name of the tensor in the checkpoint."""


def whole_box(tensor: torch.Tensor) -> ShardView:
    """The box that is a full tensor."""
    return ShardView(tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def write_boxes(
    boxes: Boxes, folder: Path, group: dist.ProcessGroup | None
) -> dict[str, FileDigest]:
    """Write what all ranks of the group hold. Collective. Returns the digests of the files that
    this rank wrote, by name.

    A box that several ranks hold is written by one of them, so that all write about as much.
    """
    writer = _Writer(folder)
    dcp.save(dict(boxes), storage_writer=writer, planner=_Saving(), process_group=group)
    return writer.files.digests


def read_boxes(boxes: Boxes, files: CheckpointFiles) -> None:
    """Read into the boxes in place; ranks need not read the same tensors.

    Raises ArtifactError if the checkpoint lacks a tensor or part of it, if shapes differ, or if
    files are damaged; some boxes may have been read then.
    """
    metadata = files.read_metadata().state_dict_metadata
    reads: list[ReadItem] = []
    for name, parts in boxes.items():
        entry = metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise _other_model(files, f"lacks {name}")
        saved_shape = tuple(entry.size)
        if wrong := [box.full_shape for box in parts if box.full_shape != saved_shape]:
            fault = f"holds {name} as {saved_shape}, and the model makes it {wrong[0]}"
            raise _other_model(files, fault)
        # Which part of each stored box goes where.
        chunks = [box.chunk for box in parts]
        reads_of_tensor = create_read_items_for_chunk_list(name, entry, chunks)
        require_all_read(
            files, name, sum(math.prod(read.lengths) for read in reads_of_tensor), parts
        )
        reads += reads_of_tensor
    with warnings.catch_warnings():
        # Each rank knows what it reads without communication; the library warns about that.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(boxes), storage_reader=files, planner=_Loading(reads), no_dist=True)
        except CheckpointException as error:
            # CheckpointException is no subclass of Exception, which callers catch.
            raise ArtifactError(
                f"The checkpoint {files.folder} cannot be read: {first_rank_error(error)}.\n"
                "  Take another checkpoint of the run."
            ) from error


def first_rank_error(error: BaseException) -> BaseException:
    """The first rank's error from an error that collects those of all ranks."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def require_all_read(
    files: CheckpointFiles, name: str, saved: int, boxes: Sequence[ShardView]
) -> None:
    """Raise ArtifactError unless the checkpoint has as many elements of a tensor as these boxes."""
    if saved != (count := sum(box.data.numel() for box in boxes)):
        raise ArtifactError(
            f"The checkpoint {files.folder} holds {saved} of {count} numbers of {name}.\n"
            "  Take another checkpoint of the run."
        )


def _other_model(files: CheckpointFiles, fault: str) -> ArtifactError:
    return ArtifactError(
        f"The checkpoint {files.folder} {fault}.\n"
        "  It belongs to another model.model_path or model.config_path."
    )


class _Saving(DefaultSavePlanner):
    """Save planner for boxes instead of DCP's one box per tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items: dict[MetadataIndex, WriteItem] = {}
        for name, parts in self.state_dict.items():
            for box in parts:
                index = MetadataIndex(name, box.offsets)
                # Only the dtype: other properties in memory must not change the file.
                properties = TensorProperties(dtype=box.dtype)
                size = torch.Size(box.full_shape)
                # By index, as two parameters of a rank may be the same box; the coordinator
                # deduplicates across ranks.
                items[index] = WriteItem(
                    index=index,
                    # A shard even if it is the full tensor: several ranks may hold it.
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(box.chunk, properties, size),
                )
        return SavePlan(list(items.values()))

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        parts: Sequence[ShardView] = self.state_dict[index.fqn]
        box = next(box for box in parts if torch.Size(box.offsets) == index.offset)
        return box.data.to(box.dtype)


class _Loading(DefaultLoadPlanner):
    """Load planner for a fixed list of reads into boxes."""

    def __init__(self, reads: Sequence[ReadItem]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._reads = list(reads)

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = dict(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._reads)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        # By index: two parameters of one rank may be the same box.
        return self.state_dict[index.fqn][index.index].data


class _Writer(FileSystemWriter):
    """DCP's file writer with deterministic files: the same content gives the same bytes."""

    def __init__(self, path: Path) -> None:
        # No copy-ahead: it starts with the smallest tensors only on CUDA, and its thread would
        # allocate memory on another rank's device.
        # `sync_files` calls fsync on each file before the manager publishes the folder.
        super().__init__(path, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        # The base class writes through `fs`, so digests need no second pass over the files.
        self.fs = self.files = _DigestedFiles()

    def storage_meta(self) -> StorageMeta:
        # The default stores this machine's path and a random id.
        return StorageMeta(checkpoint_id=None, save_id=None)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except (RuntimeError, OSError) as error:
            # For a failed write torch only reports a wrong archive length, and closing the file
            # fails again.
            if self.files.refused:
                raise self.files.refused from error
            raise


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
