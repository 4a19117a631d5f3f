"""A process group of one process that stands for a whole world."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.engine.distributed.ranks import ProcessInfo


class FakeProcessInfo(ProcessInfo):
    """A rank whose numbers equal those of all others."""

    def max_over_ranks(self, *values: int) -> list[int]:
        """`values`: what the collective leaves on the device cannot be read."""
        super().max_over_ranks(*values)
        return [int(value) for value in values]


def init_fake_process_group(rank: int, world_size: int, local_ranks: int) -> ProcessInfo:
    """Join PyTorch's `fake` backend as this rank. Other ranks' objects equal this one's."""
    # Registers the backend `fake`.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    # A store within this process: no other rank is ever started that could connect to one.
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    # The fake backend transfers nothing, and these would unpickle uninitialized buffers.
    dist.all_gather_object = _all_gather_object
    dist.gather_object = _gather_object
    dist.broadcast_object_list = _keep
    dist.scatter_object_list = _scatter_object_list
    return FakeProcessInfo(rank, rank % local_ranks, world_size, torch.device("cuda", 0))


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any
) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _keep(object_list: list[Any], *_: Any, **__: Any) -> None:
    """The source sends what this rank has."""


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    *_: Any,
    **__: Any,
) -> None:
    objects = scatter_object_input_list
    scatter_object_output_list[0] = objects[0] if objects else None
