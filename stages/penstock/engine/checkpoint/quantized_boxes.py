"""Quantized optimizer states in checkpoints: writing and reading them.

A tensor of which ranks hold boxes is quantized box by box, each with its own scales, and the name
of a box has its position in the tensor: `<name>@int8@0,64@32,64@codes` begins at (0, 64) and is 32
by 64. So a reader with other boxes finds those that overlap its own. The names in the checkpoint
alone show what is quantized.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import cast

import torch

from penstock.engine.checkpoint.dcp_io import (
    Boxes,
    ShardView,
    read_boxes,
    require_all_read,
    whole_box,
)
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.optim.quantized_states import (
    MOMENTS,
    Compressed,
    Form,
    dequantize_states,
    quantize_states,
    size_in,
)

BOX_NAME = re.compile(r"(.+)@(int8|int4)@([\d,]+)@([\d,]+)@codes")


def compressed_boxes(
    name: str, box: ShardView, form: Form | None
) -> Iterator[tuple[str, ShardView]]:
    """The boxes to write in place of this one: with a form, codes and scales for a moment of AdamW;
    otherwise the box itself."""
    moment = MOMENTS.get(name.rpartition(".")[2])
    if form is None or moment is None or box.data.dim() == 0:
        yield name, box
    elif box.data.numel():
        part = _QuantizedBox(name, form, box.offsets, tuple(box.data.shape))
        for leaf, tensor in quantize_states(box.data, moment, form)._asdict().items():
            yield f"{part}@{leaf}", whole_box(tensor)


def parse_tensor_name(name: str) -> str:
    """The name of the tensor that a checkpoint entry belongs to."""
    return name.partition("@")[0]


@dataclass(frozen=True)
class QuantizedStates:
    """The quantized optimizer states of a checkpoint."""

    files: CheckpointFiles

    def read(self, boxes: Boxes) -> Boxes:
        """Fill, in place, the boxes of tensors that are quantized in the checkpoint, and return the
        others. Raises ArtifactError if the checkpoint lacks part of a tensor."""
        plain_boxes: dict[str, Sequence[ShardView]] = {}
        for name, requested in boxes.items():
            if name in self._parts:
                self._fill(name, self._parts[name], requested)
            else:
                plain_boxes[name] = requested
        return plain_boxes

    @cached_property
    def _parts(self) -> Mapping[str, Sequence["_QuantizedBox"]]:
        parts_by_name: dict[str, list[_QuantizedBox]] = {}
        for key in self.files.read_metadata().state_dict_metadata:
            if match := BOX_NAME.fullmatch(key):
                name, form, offsets, shape = match.groups()
                part = _QuantizedBox(
                    name, cast("Form", form), _parse_ints(offsets), _parse_ints(shape)
                )
                parts_by_name.setdefault(name, []).append(part)
        return parts_by_name

    def _fill(
        self, name: str, parts: Sequence["_QuantizedBox"], boxes: Sequence[ShardView]
    ) -> None:
        needed = [part for part in parts if any(part.overlaps(box) for box in boxes)]
        empty: dict[_QuantizedBox, Compressed] = {}
        for part in needed:
            codes, blocks = size_in(part.form, prod(part.shape))
            # Scales: the value of code 0 and the step, of each block.
            empty[part] = Compressed(torch.empty(codes, dtype=torch.uint8), torch.empty(blocks, 2))
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
            moment = MOMENTS[name.rpartition(".")[2]]
            flat = dequantize_states(compressed, prod(part.shape), moment, part.form)
            filled += sum(part.copy(flat.view(part.shape), box) for box in boxes)
        require_all_read(self.files, name, filled, boxes)


@dataclass(frozen=True)
class _QuantizedBox:
    name: str
    form: Form
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        offsets, shape = (",".join(map(str, numbers)) for numbers in (self.offsets, self.shape))
        return f"{self.name}@{self.form}@{offsets}@{shape}"

    def overlaps(self, box: ShardView) -> bool:
        return all(begin < end for begin, end in self._overlap(box))

    def copy(self, values: torch.Tensor, box: ShardView) -> int:
        """Copy the overlap with the box; returns the number of elements."""
        if not self.overlaps(box):
            return 0
        shared = self._overlap(box)
        source, target = (
            tuple(
                slice(begin - first, end - first)
                for (begin, end), first in zip(shared, starts, strict=True)
            )
            for starts in (self.offsets, box.offsets)
        )
        box.data[target].copy_(values[source])
        return prod(end - begin for begin, end in shared)

    def _overlap(self, box: ShardView) -> list[tuple[int, int]]:
        return [
            (max(start, other_start), min(start + size, other_start + other_size))
            for start, size, other_start, other_size in zip(
                self.offsets, self.shape, box.offsets, box.data.shape, strict=True
            )
        ]


def _parse_ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
