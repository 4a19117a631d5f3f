"""Gather full tensors of a sharded model on rank 0, by name.

Rank 0 requests tensors by name, and the other ranks send their shards of them until it finishes.
Only requested tensors are ever complete, and only on rank 0. The location of shards is read from
the TensorShard tables, so this file depends on no layout.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo

STOP = -1
"""Sent in place of the number of tensors: no more requests."""


Box = tuple[TensorShard, torch.dtype]
"""A shard without what may differ between the ranks that hold it, and its dtype."""


class FullTensorGather:
    """A model's parameters by checkpoint name.

    Every rank must create it at the same time, with all of its parameters; then rank 0 calls
    `read`, and the others call `serve`.
    """

    folder = "the model in training"
    """The source named in errors."""

    def __init__(self, params: Iterable[LocalParam], ranks: ProcessInfo) -> None:
        self._ranks = ranks
        self._local_shards: dict[Box, tuple[TensorShard, nn.Parameter]] = {
            (replace(shard, start=0, num_copies=1, grad_reduce=None), param.parameter.dtype): (
                shard,
                param.parameter,
            )
            for param in params
            for shard in param.shards
        }
        ranks_by_name: dict[str, dict[Box, int]] = {}
        for rank, boxes in enumerate(ranks.all_gather(list(self._local_shards))):
            for box in boxes:
                # The lowest rank sends a shard: what rank 0 holds is not sent.
                ranks_by_name.setdefault(box[0].tensor, {}).setdefault(box, rank)
        self._sources = {name: ranks_by_name[name] for name in sorted(ranks_by_name)}
        self._index_by_name = {name: number for number, name in enumerate(self._sources)}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter, sorted by name."""
        boxes = {name: next(iter(sources)) for name, sources in self._sources.items()}
        return {name: (shard.full_shape, dtype) for name, (shard, dtype) in boxes.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copies of these full tensors on this rank's device. Rank 0 only, while others `serve`."""
        assert self._ranks.is_main_process, "only rank 0 reads"
        requested = list(names)
        shapes, device = self.shapes(), self._ranks.device
        # Allocate before anybody sends: a rank without memory must not leave others waiting for it.
        full_tensors = {
            name: torch.empty(shapes[name][0], dtype=shapes[name][1], device=device)
            for name in requested
        }
        receives: list[tuple[int, list[Box], torch.Tensor]] = []
        for rank in range(1, self._ranks.world_size):
            if boxes := self._shards_sent_by(rank, requested):
                # Sent as bytes, which every backend supports.
                received = torch.empty(sum(map(_nbytes, boxes)), dtype=torch.uint8, device=device)
                receives.append((rank, boxes, received))
        self._send_request([self._index_by_name[name] for name in requested])
        for box in self._shards_sent_by(0, requested):
            box[0].within(full_tensors[box[0].tensor]).copy_(self._local_data(box))
        # A rank sends one message for a request, so none of them waits for another.
        for rank, boxes, received in receives:
            with self._ranks.heartbeat.waiting():
                dist.recv(received, src=rank)
            parts = received.split([*map(_nbytes, boxes)])
            for (shard, dtype), part in zip(boxes, parts, strict=True):
                # Cloned for alignment: a view to a wider dtype needs an aligned start.
                values = part.clone().view(dtype).view(shard.sizes)
                shard.within(full_tensors[shard.tensor]).copy_(values)
        return full_tensors

    def stop_serving(self) -> None:
        """End the requests. Rank 0 calls it once, whatever has happened."""
        assert self._ranks.is_main_process, "only rank 0 reads"
        self._send_request(None)

    def serve(self) -> None:
        """Send rank 0 the shards it requests, until it finishes. Called by all other ranks."""
        names = list(self._sources)
        while (count := int(self._broadcast(torch.empty(1, dtype=torch.int64)))) != STOP:
            numbers = torch.empty(count, dtype=torch.int64)
            numbers = self._broadcast(numbers).tolist() if count else []
            boxes = self._shards_sent_by(self._ranks.rank, [names[number] for number in numbers])
            if boxes:
                with self._ranks.heartbeat.waiting():
                    data = [self._local_data(box).contiguous().view(-1) for box in boxes]
                    dist.send(torch.cat([x.view(torch.uint8) for x in data]), dst=0)

    def _send_request(self, numbers: list[int] | None) -> None:
        if self._ranks.world_size == 1:
            return
        self._broadcast(torch.tensor([STOP if numbers is None else len(numbers)]))
        if numbers:
            self._broadcast(torch.tensor(numbers))

    def _broadcast(self, numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers.to(self._ranks.device)
        with self._ranks.heartbeat.waiting():
            dist.broadcast(numbers, src=0)
            return numbers.cpu()

    def _shards_sent_by(self, rank: int, names: Sequence[str]) -> list[Box]:
        return [
            box for name in names for box, source in self._sources[name].items() if source == rank
        ]

    def _local_data(self, box: Box) -> torch.Tensor:
        shard, parameter = self._local_shards[box]
        # Offloaded parameters are in host memory, from which NCCL does not send.
        return shard.view(local(parameter.detach())).to(self._ranks.device)


def _nbytes(box: Box) -> int:
    shard, dtype = box
    return shard.numel * dtype.itemsize
