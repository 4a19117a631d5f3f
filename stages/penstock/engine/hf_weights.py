"""A model's tensors under Hugging Face's names, wherever they come from, read a few at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint_reader import CheckpointReader
from penstock.engine.weights import SafetensorsFolder
from penstock.models.initialise import initialise
from penstock.models.weights import FUSED, WeightMap


@dataclass(frozen=True)
class HfWeights:
    """All tensors a Hugging Face checkpoint of the model holds, in the model's order."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]]
    """Names to tensors on the CPU, in the dtype they are kept in."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors; a tied head counts once."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def in_checkpoint(reader: CheckpointReader, names: WeightMap) -> HfWeights:
    """The tensors of a training checkpoint; `names` must say `merge_qkv` as the run did.

    Raises ArtifactError when the checkpoint is of another model.
    """
    found = reader.shapes()
    for native in names.native_names():
        shape = found[native][0] if native in found else None
        if shape != names.native_shape(native):
            raise ArtifactError(
                f"{native} is {shape or 'absent'} in {reader.folder}, and the config makes it "
                f"{names.native_shape(native)}.\n"
                "  model.config_path or model.foundation is not what the run was trained with."
            )
    native_of = {hf: native for native in names.native_names() for hf in names.hf_names(native)}

    def read(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        natives = reader.read(sorted({native_of[name] for name in wanted}))
        parts: dict[str, torch.Tensor] = {}
        for native, tensor in natives.items():
            parts |= names.to_hf(native, tensor)
        return {name: parts[name] for name in wanted}

    return HfWeights(names.hf_shapes(), read)


def in_folder(folder: SafetensorsFolder, names: WeightMap) -> HfWeights:
    """The tensors of a Hugging Face folder. Raises CapabilityError when it lacks one."""
    shapes = names.hf_shapes()
    folder.require(shapes)
    return HfWeights(shapes, lambda wanted: {name: folder[name] for name in wanted})


def from_seed(names: WeightMap, seed: int) -> HfWeights:
    """The random start of a model that was given no weights."""
    shapes = names.hf_shapes()

    def read(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: initialise(name, shapes[name], seed, names.config) for name in wanted}

    return HfWeights(shapes, read)


def is_fused(reader: CheckpointReader) -> bool:
    """Whether the run held the three projections into attention as one (`model.merge_qkv`)."""
    return any(f".{FUSED}." in name for name in reader.shapes())
