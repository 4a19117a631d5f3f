"""Gather full tensors of a sharded model on rank 0, by name.

Rank 0 requests tensors by name, and the other ranks send their shards of them until it finishes.
Only requested tensors are ever complete, and only on rank 0. The location of shards is read from
the TensorShard tables, so this file depends on no layout.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo

STOP = -1
"""Sent in place of the number of tensors: no more requests."""


@dataclass(frozen=True)
class _ShardKey:
    """The position of a shard in its tensor; equal on every rank that holds this shard."""

    tensor: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of this box in the full tensor."""
        for dim, (first, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, first, size)
        return tensor


class FullTensorGather:
    """A model's parameters by checkpoint name.

    Every rank must create it at the same time, with all of its parameters; then rank 0 calls
    `read`, and the others call `serve`.
    """

    folder = "the model in training"
    """The source named in errors."""

    def __init__(self, params: Iterable[LocalParam], ranks: ProcessInfo) -> None:
        self._ranks = ranks
        self._local_shards: dict[_ShardKey, tuple[TensorShard, nn.Parameter]] = {
            _ShardKey(
                piece.tensor, piece.full_shape, piece.offsets, piece.sizes, param.parameter.dtype
            ): (
                piece,
                param.parameter,
            )
            for param in params
            for piece in param.shards
        }
        ranks_by_name: dict[str, dict[_ShardKey, int]] = {}
        for rank, boxes in enumerate(ranks.all_gather(list(self._local_shards))):
            for box in boxes:
                # The lowest rank sends a shard: what rank 0 holds is not sent.
                ranks_by_name.setdefault(box.tensor, {}).setdefault(box, rank)
        self._sources = {name: ranks_by_name[name] for name in sorted(ranks_by_name)}
        self._index_by_name = {name: number for number, name in enumerate(self._sources)}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter, sorted by name."""
        boxes = {name: next(iter(sources)) for name, sources in self._sources.items()}
        return {name: (box.full_shape, box.dtype) for name, box in boxes.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return copies of these full tensors on this rank's device.

        Rank 0 only, while all other ranks run `serve`.
        """
        assert self._ranks.is_main_process, "only rank 0 reads"
        requested = list(names)
        shapes, device = self.shapes(), self._ranks.device
        # Allocate before anybody sends: a rank without memory must not leave others waiting for it.
        full_tensors = {
            name: torch.empty(shapes[name][0], dtype=shapes[name][1], device=device)
            for name in requested
        }
        receives: list[tuple[int, list[_ShardKey], torch.Tensor]] = []
        for rank in range(1, self._ranks.world_size):
            if boxes := self._shards_sent_by(rank, requested):
                # Sent as bytes, which every backend supports.
                size = sum(box.nbytes for box in boxes)
                receives.append((rank, boxes, torch.empty(size, dtype=torch.uint8, device=device)))
        self._send_request([self._index_by_name[name] for name in requested])
        for box in self._shards_sent_by(0, requested):
            box.within(full_tensors[box.tensor]).copy_(self._local_data(box))
        # A rank sends one message for a request, so none of them waits for another.
        for rank, boxes, arrived in receives:
            with self._ranks.heartbeat.waiting():
                dist.recv(arrived, src=rank)
            for box, part in zip(boxes, arrived.split([b.nbytes for b in boxes]), strict=True):
                # Cloned for alignment: a view to a wider dtype needs an aligned start.
                numbers = part.clone().view(box.dtype).view(box.sizes)
                box.within(full_tensors[box.tensor]).copy_(numbers)
        return full_tensors

    def stop_serving(self) -> None:
        """End the requests. Rank 0 calls it once, whatever has happened."""
        assert self._ranks.is_main_process, "only rank 0 reads"
        self._send_request(None)

    def serve(self) -> None:
        """Send rank 0 the shards it requests, until it finishes. Called by all other ranks."""
        names = list(self._sources)
        while (numbers := self._receive_request()) is not None:
            self._send_shards([names[number] for number in numbers])

    def _send_request(self, numbers: list[int] | None) -> None:
        if self._ranks.world_size == 1:
            return
        self._broadcast(torch.tensor([STOP if numbers is None else len(numbers)]))
        if numbers:
            self._broadcast(torch.tensor(numbers))

    def _receive_request(self) -> list[int] | None:
        count = int(self._broadcast(torch.empty(1, dtype=torch.int64)))
        if count == STOP:
            return None
        return self._broadcast(torch.empty(count, dtype=torch.int64)).tolist() if count else []

    def _broadcast(self, numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers.to(self._ranks.device)
        with self._ranks.heartbeat.waiting():
            dist.broadcast(numbers, src=0)
            return numbers.cpu()

    def _shards_sent_by(self, rank: int, names: Sequence[str]) -> list[_ShardKey]:
        """The shards that a rank sends of these tensors, in order."""
        return [
            box for name in names for box, source in self._sources[name].items() if source == rank
        ]

    def _send_shards(self, names: Sequence[str]) -> None:
        boxes = self._shards_sent_by(self._ranks.rank, names)
        if boxes:
            with self._ranks.heartbeat.waiting():
                dist.send(torch.cat([_bytes(self._local_data(box)) for box in boxes]), dst=0)

    def _local_data(self, box: _ShardKey) -> torch.Tensor:
        """This rank's shard of a tensor, on the device of the process group."""
        piece, parameter = self._local_shards[box]
        return piece.view(local(parameter.detach())).to(self._ranks.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
