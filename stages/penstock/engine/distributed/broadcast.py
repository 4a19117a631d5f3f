"""What rank 0 tells all ranks, and what each of them tells the others of how it went, as bytes.

On a group of its own, which a rank that failed in the midst of a computation can still speak over.
Nothing is pickled.
"""

import datetime

import torch
import torch.distributed as dist

from penstock.engine.distributed.ranks import ProcessInfo


class ControlBroadcast:
    """Every rank makes one at the same time, and the same calls."""

    def __init__(self, ranks: ProcessInfo, seconds: float | None = None) -> None:
        """`seconds`: how long ranks wait for one another; None: half an hour, as torch has it."""
        self._ranks = ranks
        timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def heard(self, frame: bytes = b"") -> bytes:
        """What rank 0 says, on all ranks. They do not wait for ever: rank 0 has to say something,
        be it nothing, before."""
        return self._from(0, frame)

    def agreed(self, fault: bytes | None) -> list[bytes | None]:
        """What went wrong on each rank, in their order, on all of them; None where nothing did."""
        marks = torch.zeros(self._ranks.world, dtype=torch.int64)
        marks[self._ranks.rank] = fault is not None
        dist.all_reduce(marks, group=self._group)
        return [
            self._from(rank, fault or b"") if mark else None
            for rank, mark in enumerate(marks.tolist())
        ]

    def _from(self, rank: int, frame: bytes) -> bytes:
        size = torch.tensor([len(frame)])
        dist.broadcast(size, src=rank, group=self._group)
        if not (count := int(size.item())):
            return b""
        if self._ranks.rank == rank:
            told = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        else:
            told = torch.empty(count, dtype=torch.uint8)
        dist.broadcast(told, src=rank, group=self._group)
        return told.numpy().tobytes()
