"""Hugging Face state dict: a model's tensors by name, read a few at a time from any source."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.core.errors import ArtifactError
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.quantization.quantized_reader import TensorReader
from penstock.engine.quantization.select_layers import Formats
from penstock.models.multimodal import is_language, stored_backbone, stored_name
from penstock.models.vision.types import is_vision
from penstock.models.weights import WeightMap
from penstock_kernels.quant import QuantizedTensor, dequantize


class Tensors(Protocol):
    """A model's parameters by their names in a training checkpoint."""

    @property
    def folder(self) -> object:
        """The source named in errors."""
        ...

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter; reads no tensor."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read exactly these full parameters."""
        ...


@dataclass(frozen=True)
class HFStateDict:
    """All tensors of the model's Hugging Face checkpoint, in model order."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]]
    """Reads tensors by name to the CPU, in their stored dtype."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    """The dtypes of tensors that are always saved in this one."""

    @property
    def num_parameters(self) -> int:
        """A tied head counts once."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def renamed(self, sources: Mapping[str, str]) -> "HFStateDict":
        """The tensors in `sources`, which are the names here by the new ones."""

        def read(requested: Sequence[str]) -> dict[str, torch.Tensor]:
            tensors = self.read(list(dict.fromkeys(sources[name] for name in requested)))
            return {name: tensors[sources[name]] for name in requested}

        shapes = {name: self.shapes[source] for name, source in sources.items()}
        dtypes = {name: self.dtypes[of] for name, of in sources.items() if of in self.dtypes}
        return HFStateDict(shapes, read, dtypes)

    def without(self, names: Iterable[str]) -> "HFStateDict":
        left_out = {*names}
        shapes = {name: shape for name, shape in self.shapes.items() if name not in left_out}
        return HFStateDict(shapes, self.read, self.dtypes)

    def joined(self, added: "HFStateDict") -> "HFStateDict":
        if not added.shapes:
            return self

        def read(requested: Sequence[str]) -> dict[str, torch.Tensor]:
            tensors: dict[str, torch.Tensor] = {}
            for part in (self, added):
                if names := [name for name in requested if name in part.shapes]:
                    tensors |= part.read(names)
            return tensors

        return HFStateDict({**self.shapes, **added.shapes}, read, {**self.dtypes, **added.dtypes})


def in_checkpoint(reader: Tensors, names: WeightMap, formats: Formats | None = None) -> HFStateDict:
    """The tensors of a training checkpoint; matrices in `formats` are dequantized to fp32. Raises
    ArtifactError if it is of another model."""
    saved, shapes, quantized = reader.shapes(), names.hf_shapes(), formats or {}
    for name, shape in shapes.items():
        saved_shape = saved.get(f"{name}.codes" if name in quantized else name, (None,))[0]
        # A stack of experts [E, K, N] is quantized as rows of K columns.
        rows = shape[0] * math.prod(shape[2:])
        expected = (rows, quantized[name].row_bytes(shape[1])) if name in quantized else shape
        if saved_shape != expected:
            raise ArtifactError(
                f"{name} is {saved_shape or 'absent'} in {reader.folder}, and the config makes it "
                f"{expected}.\n"
                "  model.config_path or model.foundation is not what the run was trained with."
            )

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        plain = reader.read(name for name in names if name not in quantized)
        for name in names:
            if name in quantized:
                leaves = quantized[name].widths(shapes[name][1])
                stored = reader.read(f"{name}.{leaf}" for leaf in leaves)
                of_leaf = {leaf: stored[f"{name}.{leaf}"] for leaf in leaves}
                value = QuantizedTensor.of_bytes(quantized[name], shapes[name][1], of_leaf)
                plain[name] = dequantize(value, torch.float32)
                if len(shapes[name]) == 3:
                    experts, _, outputs = shapes[name]
                    plain[name] = plain[name].unflatten(0, (experts, outputs)).mT.contiguous()
        return {name: plain[name] for name in names}

    return HFStateDict(shapes, read, _exact(names, shapes))


def from_reader(
    reader: TensorReader, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> HFStateDict:
    """The tensors with these names and shapes."""

    def read(requested: Sequence[str]) -> dict[str, torch.Tensor]:
        return {
            name: reader.box(name, (0,) * len(shapes[name]), shapes[name]) for name in requested
        }

    return HFStateDict(shapes, read, dtypes)


def in_source(source: TensorReader, names: WeightMap) -> HFStateDict:
    """The model's tensors of a folder, or of a reader that wraps it. Raises CapabilityError if one
    is missing."""
    shapes = names.hf_shapes()
    source.require(shapes)
    return from_reader(source, shapes, _exact(names, shapes))


def in_multimodal(
    weights: HFStateDict, folder: SafetensorsFolder, vision_names: Mapping[str, str]
) -> HFStateDict:
    """The whole multimodal model in `folder` with these weights of its language model, and of its
    vision part as far as that was trained, under the names in its files. Its other tensors are
    saved as they are. `vision_names` are the names here of the vision part's, by those in the
    files.
    """
    stored = folder.names()
    backbone = stored_backbone(stored)
    own = {stored_name(name, backbone): name for name in weights.shapes if not is_vision(name)}
    own |= {name: native for name, native in vision_names.items() if native in weights.shapes}
    frozen = {
        name: folder.stored(name) for name in stored if not is_language(name) and name not in own
    }
    shapes = {name: entry.shape for name, entry in frozen.items()}
    dtypes = {name: entry.dtype for name, entry in frozen.items()}
    return weights.renamed(own).joined(from_reader(folder, shapes, dtypes))


def _exact(names: WeightMap, shapes: Iterable[str]) -> dict[str, torch.dtype]:
    return {name: torch.float32 for name in shapes if names.is_exact(name)}
