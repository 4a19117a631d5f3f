"""Reads tensors whose rows lie in several tensors of a file; see `row_chunks.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.engine.hf.row_chunks import RowChunk, find_row_chunks
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.engine.quantization.quantized_reader import TensorReader
from penstock.models.weights import WeightMap


def row_chunks_in(
    names: WeightMap, folder: SafetensorsFolder
) -> Mapping[str, tuple[RowChunk, ...]]:
    """The tensors that the folder cuts at other rows, by their names."""
    return find_row_chunks(names, folder.names(), lambda name: folder.stored(name).shape)


@dataclass(frozen=True)
class RowChunkReader:
    """A `TensorReader` over another, some of whose tensors are cut at other rows."""

    inner: TensorReader
    chunks: Mapping[str, tuple[RowChunk, ...]]

    def stored(self, name: str) -> Stored:
        """Shape and dtype."""
        stored = self.inner.stored(name)
        if name not in self.chunks:
            return stored
        rows = sum(chunk.num_rows for chunk in self.chunks[name])
        return replace(stored, shape=(rows, *stored.shape[1:]))

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, as stored."""
        if name not in self.chunks:
            return self.inner.box(name, offsets, sizes)
        boxes, first = [], 0
        for chunk in self.chunks[name]:
            lowest = max(offsets[0], first)
            rows = min(offsets[0] + sizes[0], first + chunk.num_rows) - lowest
            offsets_in_chunk = chunk.start + lowest - first, *offsets[1:]
            boxes += (
                [self.inner.box(chunk.source, offsets_in_chunk, (rows, *sizes[1:]))]
                if rows > 0
                else []
            )
            first += chunk.num_rows
        # A box without rows is empty in any tensor.
        return torch.cat(boxes) if boxes else self.inner.box(name, (0,) * len(sizes), sizes)

    def order(self, name: str) -> tuple[str, int]:
        """A sort key: the order of tensors in the files."""
        return self.inner.order(name)

    def require(self, names: Iterable[str]) -> None:
        """Raise CapabilityError unless every name exists."""
        self.inner.require(names)
