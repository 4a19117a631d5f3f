"""Boxes of tensors in torch.distributed.checkpoint (DCP), and reading them.

A rank's part of a tensor may be several boxes, and several ranks may hold the same one; DCP's own
planners support one box per tensor. Files name tensors only, never ranks, so any layout can read a
checkpoint.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

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
