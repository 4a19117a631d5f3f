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
        # Gloo beside NCCL: messages are in host memory, and after a CUDA error NCCL can send
        # nothing.
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def all_gather_errors(self, error: bytes | None) -> list[bytes | None]:
        """All-gather the error of each rank, in rank order; None for ranks without an error."""
        has_error = torch.zeros(self._ranks.world_size, dtype=torch.int64)
        has_error[self._ranks.rank] = error is not None
        # One collective for the flags; after it only ranks with an error send something.
        dist.all_reduce(has_error, group=self._group)
        flags = enumerate(has_error.tolist())
        return [self.broadcast(error or b"", rank) if flag else None for rank, flag in flags]

    def broadcast(self, frame: bytes = b"", rank: int = 0) -> bytes:
        """Broadcast the `frame` of `rank` and return it on all ranks.

        Ranks do not wait forever: it must send something, even an empty frame, before the timeout.
        """
        size = torch.tensor([len(frame)])
        dist.broadcast(size, src=rank, group=self._group)
        if not (count := int(size.item())):
            return b""
        if self._ranks.rank == rank:
            # A copy that can be written to: torch warns of tensors over `bytes`.
            payload = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        else:
            payload = torch.empty(count, dtype=torch.uint8)
        dist.broadcast(payload, src=rank, group=self._group)
        return payload.numpy().tobytes()
