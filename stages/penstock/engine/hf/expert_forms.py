"""Read and write experts that files have in another form than `WeightMap` says; see
`expert_parts.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.engine.hf.expert_parts import Part, find_parts
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.engine.hf.state_dict import HFStateDict
from penstock.models.weights import WeightMap


def parts_in(names: WeightMap, folder: SafetensorsFolder) -> Mapping[str, Part]:
    """The tensors that the folder has in another form, by their names in the map. The folder's
    names are those of the map, as far as the forms agree."""
    return find_parts(names, set(folder.names()), lambda name: folder.stored(name).shape)


@dataclass(frozen=True)
class TensorParts:
    """A `TensorReader` of a folder, some of whose tensors are parts of those in the files."""

    folder: SafetensorsFolder
    parts: Mapping[str, Part]
    names: WeightMap

    def stored(self, name: str) -> Stored:
        """Shape and dtype."""
        part = self.parts.get(name)
        if part is None:
            return self.folder.stored(name)
        return replace(self.folder.stored(part.source), shape=self.names.hf_shapes()[name])

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, as stored."""
        part = self.parts.get(name)
        if part is None:
            return self.folder.box(name, offsets, sizes)
        tensor = self.folder.box(part.source, *part.box(offsets, sizes))
        # Further dimensions of the source come first, and are 1 in the box.
        tensor = tensor.flatten(0, tensor.ndim - len(sizes))
        return tensor.mT.contiguous() if part.is_transposed else tensor

    def order(self, name: str) -> tuple[str, int]:
        """A sort key: the order of tensors in the files."""
        part = self.parts.get(name)
        return self.folder.order(part.source if part else name)

    def require(self, names: Iterable[str]) -> None:
        """Raise CapabilityError unless every name exists."""
        self.folder.require(name for name in names if name not in self.parts)


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
            into = joined
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                into = into.narrow(dim, offset, size)
            into.copy_((tensor.mT if parts[name].is_transposed else tensor).reshape(sizes))
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
