"""Read and write tensors whose form in files is not that of `WeightMap` (`stored_parts.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored, narrow
from penstock.engine.hf.state_dict import HFStateDict
from penstock.engine.hf.stored_parts import Part, RowChunk, find_parts, find_row_chunks
from penstock.engine.quantization.quantized_reader import TensorReader
from penstock.models.weights import WeightMap


def parts_in(names: WeightMap, folder: SafetensorsFolder) -> Mapping[str, Part]:
    """The tensors that the folder has in another form, by their names in the map. The folder's
    names are those of the map, as far as the forms agree."""
    return find_parts(names, set(folder.names()), lambda name: folder.stored(name).shape)


def row_chunks_in(
    names: WeightMap, folder: SafetensorsFolder
) -> Mapping[str, tuple[RowChunk, ...]]:
    """The tensors that the folder cuts at other rows, by their names."""
    return find_row_chunks(names, folder.names(), lambda name: folder.stored(name).shape)


@dataclass(frozen=True)
class TensorParts:
    """A `TensorReader` of a folder, some of whose tensors are parts of those in the files."""

    folder: SafetensorsFolder
    parts: Mapping[str, Part]
    names: WeightMap

    def stored(self, name: str) -> Stored:
        part = self.parts.get(name)
        if part is None:
            return self.folder.stored(name)
        return replace(self.folder.stored(part.source), shape=self.names.hf_shapes()[name])

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        part = self.parts.get(name)
        if part is None:
            return self.folder.box(name, offsets, sizes)
        tensor = self.folder.box(part.source, *part.box(offsets, sizes))
        # Further dimensions of the source come first, and are 1 in the box.
        tensor = tensor.flatten(0, tensor.ndim - len(sizes))
        return tensor.mT.contiguous() if part.is_transposed else tensor

    def order(self, name: str) -> tuple[str, int]:
        part = self.parts.get(name)
        return self.folder.order(part.source if part else name)

    def require(self, names: Iterable[str]) -> None:
        self.folder.require(name for name in names if name not in self.parts)


@dataclass(frozen=True)
class RowChunkReader:
    """A `TensorReader` over another, some of whose tensors are cut at other rows."""

    inner: TensorReader
    chunks: Mapping[str, tuple[RowChunk, ...]]

    def stored(self, name: str) -> Stored:
        stored = self.inner.stored(name)
        if name not in self.chunks:
            return stored
        rows = sum(chunk.num_rows for chunk in self.chunks[name])
        return replace(stored, shape=(rows, *stored.shape[1:]))

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if name not in self.chunks:
            return self.inner.box(name, offsets, sizes)
        boxes, first = [], 0
        for chunk in self.chunks[name]:
            lowest = max(offsets[0], first)
            rows = min(offsets[0] + sizes[0], first + chunk.num_rows) - lowest
            offsets_in_chunk = chunk.start + lowest - first, *offsets[1:]
            if rows > 0:
                boxes.append(self.inner.box(chunk.source, offsets_in_chunk, (rows, *sizes[1:])))
            first += chunk.num_rows
        # A box without rows is empty in any tensor.
        return torch.cat(boxes) if boxes else self.inner.box(name, (0,) * len(sizes), sizes)

    def order(self, name: str) -> tuple[str, int]:
        return self.inner.order(name)

    def require(self, names: Iterable[str]) -> None:
        self.inner.require(names)


def in_files_form(
    weights: HFStateDict, folder: SafetensorsFolder, parts: Mapping[str, Part]
) -> HFStateDict:
    """The tensors in the form of the folder's files."""
    if not parts:
        return weights
    by_source: dict[str, list[str]] = {}
    for name in weights.shapes:
        by_source.setdefault(parts[name].source if name in parts else name, []).append(name)
    shapes = {
        source: folder.stored(source).shape if natives[0] in parts else weights.shapes[source]
        for source, natives in by_source.items()
    }

    def whole(source: str) -> torch.Tensor:
        tensors = weights.read(by_source[source])
        first = next(iter(tensors.values()))
        joined = torch.empty(shapes[source], dtype=first.dtype)
        for name, tensor in tensors.items():
            offsets, sizes = parts[name].box((0,) * tensor.ndim, tensor.shape)
            part = (tensor.mT if parts[name].is_transposed else tensor).reshape(sizes)
            narrow(joined, offsets, sizes).copy_(part)
        return joined

    def read(requested: Sequence[str]) -> dict[str, torch.Tensor]:
        same = [name for name in requested if by_source[name] == [name] and name not in parts]
        tensors = weights.read(same)
        return {name: tensors[name] if name in tensors else whole(name) for name in requested}

    dtypes = {
        source: weights.dtypes[natives[0]]
        for source, natives in by_source.items()
        if natives[0] in weights.dtypes
    }
    return HFStateDict(shapes, read, dtypes)
