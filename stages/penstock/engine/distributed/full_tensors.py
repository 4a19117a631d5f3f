"""What all ranks hold of a model, tensor by tensor, as the leading rank sees it.

The leading rank asks for tensors by name, and the others give what they have of them until it lets
them go. Only what is asked for at once is ever whole: neither more of the model, nor on any other
rank. What lies where is read off the pieces, so that no layout is known here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo

ENOUGH = -1
"""Told in place of a number of tensors: nothing more is asked for."""


@dataclass(frozen=True)
class _Box:
    """A part of a tensor, the same on every rank that has it."""

    tensor: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of it in all of the tensor."""
        for dim, (first, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, first, size)
        return tensor


class FullTensorGather:
    """The parameters of a model by their names in a checkpoint. Every rank makes one at the same
    time, of all that it holds; then the leading one reads, and the others `give`."""

    folder = "the model in training"
    """Where they are, for errors."""

    def __init__(self, held: Iterable[LocalParam], ranks: ProcessInfo) -> None:
        self._ranks = ranks
        self._here: dict[_Box, tuple[TensorShard, nn.Parameter]] = {
            _box(piece, one.parameter): (piece, one.parameter)
            for one in held
            for piece in one.pieces
        }
        found: dict[str, dict[_Box, int]] = {}
        for rank, boxes in enumerate(ranks.gather(list(self._here))):
            for box in boxes:
                # The lowest rank sends it: what the leading one has does not travel.
                found.setdefault(box.tensor, {}).setdefault(box, rank)
        self._sources = {name: found[name] for name in sorted(found)}
        self._numbers = {name: number for number, name in enumerate(self._sources)}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter, in the order of the names."""
        boxes = {name: next(iter(sources)) for name, sources in self._sources.items()}
        return {name: (box.whole, box.dtype) for name, box in boxes.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copies of these, whole, on this rank's device. Of the leading rank alone, while all
        others give."""
        assert self._ranks.leads, "another rank reads"
        wanted = list(names)
        shapes, device = self.shapes(), self._ranks.device
        # Before anybody sends: a rank without room must not leave others waiting for it.
        wholes = {
            name: torch.empty(shapes[name][0], dtype=shapes[name][1], device=device)
            for name in wanted
        }
        arriving: list[tuple[int, list[_Box], torch.Tensor]] = []
        for rank in range(1, self._ranks.world):
            if boxes := self._from(rank, wanted):
                # As bytes, which every backend sends.
                size = sum(box.nbytes for box in boxes)
                arriving.append((rank, boxes, torch.empty(size, dtype=torch.uint8, device=device)))
        self._tell([self._numbers[name] for name in wanted])
        for box in self._from(0, wanted):
            box.within(wholes[box.tensor]).copy_(self._part(box))
        for rank, boxes, arrived in arriving:
            with self._ranks.pulse.waiting():
                dist.recv(arrived, src=rank)
            for box, part in zip(boxes, arrived.split([b.nbytes for b in boxes]), strict=True):
                # In memory of its own, where a number of several bytes may begin.
                numbers = part.clone().view(box.dtype).view(box.sizes)
                box.within(wholes[box.tensor]).copy_(numbers)
        return wholes

    def let_go(self) -> None:
        """Let the others go on. Called once by the leading rank, whatever has happened."""
        assert self._ranks.leads, "another rank reads"
        self._tell(None)

    def give(self) -> None:
        """Send the leading rank what it asks for, until it lets go. Called by all others."""
        names = list(self._sources)
        while (numbers := self._told()) is not None:
            self._sent([names[number] for number in numbers])

    def _tell(self, numbers: list[int] | None) -> None:
        if self._ranks.world == 1:
            return
        self._broadcast(torch.tensor([ENOUGH if numbers is None else len(numbers)]))
        if numbers:
            self._broadcast(torch.tensor(numbers))

    def _told(self) -> list[int] | None:
        count = int(self._broadcast(torch.empty(1, dtype=torch.int64)))
        if count == ENOUGH:
            return None
        return self._broadcast(torch.empty(count, dtype=torch.int64)).tolist() if count else []

    def _broadcast(self, numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers.to(self._ranks.device)
        with self._ranks.pulse.waiting():
            dist.broadcast(numbers, src=0)
            return numbers.cpu()

    def _from(self, rank: int, names: Sequence[str]) -> list[_Box]:
        """What a rank sends of these, in order."""
        return [
            box for name in names for box, source in self._sources[name].items() if source == rank
        ]

    def _sent(self, names: Sequence[str]) -> None:
        boxes = self._from(self._ranks.rank, names)
        if boxes:
            with self._ranks.pulse.waiting():
                dist.send(torch.cat([_bytes(self._part(box)) for box in boxes]), dst=0)

    def _part(self, box: _Box) -> torch.Tensor:
        """What this rank has of a tensor, where its group reaches it."""
        piece, parameter = self._here[box]
        return piece.of(local(parameter.detach())).to(self._ranks.device)


def _box(piece: TensorShard, parameter: nn.Parameter) -> _Box:
    return _Box(piece.tensor, piece.whole, piece.offsets, piece.sizes, parameter.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
