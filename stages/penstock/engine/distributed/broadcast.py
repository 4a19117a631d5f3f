"""Control broadcasts of bytes: messages from rank 0, and error reports from every rank.

They use a process group of their own, so a rank whose computation failed can still communicate.
Nothing is pickled.
"""

import datetime

import torch
import torch.distributed as dist

from penstock.engine.distributed.ranks import ProcessInfo


class ControlBroadcast:
    """Broadcasts of bytes between ranks; every rank must create it and make the same calls."""

    def __init__(self, ranks: ProcessInfo, seconds: float | None = None) -> None:
        """`seconds` is the timeout of a broadcast; None: torch's default, half an hour."""
        self._ranks = ranks
        timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def broadcast(self, frame: bytes = b"") -> bytes:
        """Broadcast rank 0's `frame` and return it on all ranks.

        Ranks do not wait forever: rank 0 must send something, even an empty frame, before the
        timeout.
        """
        return self._from(0, frame)

    def all_gather_errors(self, fault: bytes | None) -> list[bytes | None]:
        """All-gather the error of each rank, in rank order; None for ranks without an error."""
        marks = torch.zeros(self._ranks.world_size, dtype=torch.int64)
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
