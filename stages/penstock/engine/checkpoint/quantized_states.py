"""Optimizer states in few bits in a checkpoint: what is written of each, and how it is read.

A tensor of which ranks hold boxes is compressed box by box, each with scales of its own, and a box
goes by its place in the tensor: `<name>@int8@0,64@32,64@codes` begins at (0, 64) and is 32 by 64.
So a reader that holds other boxes finds those that its own are made of. What is compressed and what
is not is told from the names in the checkpoint alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import cast

import torch

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint.dcp_io import Boxes, ShardView, read_boxes, whole_box
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.optim.quantized_states import (
    MOMENTS,
    Compressed,
    Form,
    Moment,
    dequantize_states,
    quantize_states,
    size_in,
)

PLACED = re.compile(r"(.+)@(int8|int4)@([\d,]+)@([\d,]+)@codes")


def compressed_boxes(name: str, box: ShardView, form: Form) -> Iterator[tuple[str, ShardView]]:
    """What is written in place of a box of the tensor of this name: itself, unless it is of a
    moment of AdamW's, and then codes and scales."""
    moment = MOMENTS.get(name.rpartition(".")[2])
    if moment is None or box.data.dim() == 0:
        yield name, box
    elif box.data.numel():
        part = _Part(name, form, box.offsets, tuple(box.data.shape))
        for leaf, tensor in quantize_states(box.data, moment, form)._asdict().items():
            yield f"{part}@{leaf}", whole_box(tensor)


def parse_tensor_name(name: str) -> str:
    """The name of the tensor that something in a checkpoint belongs to."""
    return name.partition("@")[0]


@dataclass(frozen=True)
class QuantizedStates:
    """Those in a checkpoint."""

    files: CheckpointFiles

    def read(self, boxes: Boxes) -> Boxes:
        """Fill, in place, the boxes of tensors that are compressed there; the others.

        Raises ArtifactError where the checkpoint does not have all of a tensor.
        """
        left: dict[str, Sequence[ShardView]] = {}
        for name, wanted in boxes.items():
            if name in self._parts:
                self._fill(name, self._parts[name], wanted)
            else:
                left[name] = wanted
        return left

    @cached_property
    def _parts(self) -> Mapping[str, Sequence["_Part"]]:
        found: dict[str, list[_Part]] = {}
        for key in self.files.read_metadata().state_dict_metadata:
            if match := PLACED.fullmatch(key):
                name, form, offsets, shape = match.groups()
                part = _Part(name, cast("Form", form), _numbers(offsets), _numbers(shape))
                found.setdefault(name, []).append(part)
        return found

    def _fill(self, name: str, parts: Sequence["_Part"], boxes: Sequence[ShardView]) -> None:
        needed = [part for part in parts if any(part.meets(box) for box in boxes)]
        empty = {part: part.empty() for part in needed}
        read_boxes(
            {
                f"{part}@{leaf}": [whole_box(tensor)]
                for part, compressed in empty.items()
                for leaf, tensor in compressed._asdict().items()
            },
            self.files,
        )
        filled = 0
        for part, compressed in empty.items():
            values = dequantize_states(compressed, prod(part.shape), part.moment, part.form).view(
                part.shape
            )
            filled += sum(part.copy(values, box) for box in boxes)
        if filled != (wanted := sum(box.data.numel() for box in boxes)):
            raise ArtifactError(
                f"The checkpoint {self.files.folder} holds {filled} of {wanted} numbers of {name}."
                "\n  Take another checkpoint of the run."
            )


@dataclass(frozen=True)
class _Part:
    """A compressed box of a tensor."""

    name: str
    form: Form
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        offsets, shape = (",".join(map(str, each)) for each in (self.offsets, self.shape))
        return f"{self.name}@{self.form}@{offsets}@{shape}"

    @property
    def moment(self) -> Moment:
        """Which one it is of."""
        return MOMENTS[self.name.rpartition(".")[2]]

    def empty(self) -> Compressed:
        """Room for it."""
        codes, blocks = size_in(self.form, prod(self.shape))
        return Compressed(torch.empty(codes, dtype=torch.uint8), torch.empty(blocks, 2))

    def meets(self, box: ShardView) -> bool:
        """Whether anything of it lies in the box."""
        return all(begin < end for begin, end in self._shared(box))

    def copy(self, values: torch.Tensor, box: ShardView) -> int:
        """Copy what lies in the box; how many numbers that are."""
        if not self.meets(box):
            return 0
        shared = self._shared(box)
        mine, its = (
            tuple(
                slice(begin - first, end - first)
                for (begin, end), first in zip(shared, at, strict=True)
            )
            for at in (self.offsets, box.offsets)
        )
        box.data[its].copy_(values[mine])
        return prod(end - begin for begin, end in shared)

    def _shared(self, box: ShardView) -> list[tuple[int, int]]:
        """Where it and the box lie over each other, along every dimension."""
        return [
            (max(mine, its), min(mine + size, its + its_size))
            for mine, size, its, its_size in zip(
                self.offsets, self.shape, box.offsets, box.data.shape, strict=True
            )
        ]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
