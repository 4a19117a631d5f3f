"""A model's tensors under Hugging Face's names, wherever they come from, read a few at a time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint_reader import CheckpointReader
from penstock.engine.safetensors_folder import SafetensorsFolder
from penstock.models.initialise import initialise
from penstock.models.weights import WeightMap


@dataclass(frozen=True)
class HfWeights:
    """All tensors a Hugging Face checkpoint of the model holds, in the model's order."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]]
    """Names to tensors on the CPU, in the dtype they are kept in."""
    exact: Collection[str] = ()
    """Names of tensors that a checkpoint keeps in fp32, whatever the others are in."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors; a tied head counts once."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def in_checkpoint(reader: CheckpointReader, names: WeightMap) -> HfWeights:
    """The tensors of a training checkpoint. Raises ArtifactError when it is of another model."""
    found, shapes = reader.shapes(), names.hf_shapes()
    for name, shape in shapes.items():
        there = found[name][0] if name in found else None
        if there != shape:
            raise ArtifactError(
                f"{name} is {there or 'absent'} in {reader.folder}, and the config makes it "
                f"{shape}.\n"
                "  model.config_path or model.foundation is not what the run was trained with."
            )
    return HfWeights(shapes, reader.read, _exact(names, shapes))


def in_folder(folder: SafetensorsFolder, names: WeightMap) -> HfWeights:
    """The tensors of a Hugging Face folder. Raises CapabilityError when it lacks one."""
    shapes = names.hf_shapes()
    folder.require(shapes)
    return HfWeights(
        shapes, lambda wanted: {name: folder[name] for name in wanted}, _exact(names, shapes)
    )


def from_seed(names: WeightMap, seed: int) -> HfWeights:
    """The random start of a model that was given no weights."""
    shapes = names.hf_shapes()

    def read(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: initialise(name, shapes[name], seed, names.config) for name in wanted}

    return HfWeights(shapes, read, _exact(names, shapes))


def _exact(names: WeightMap, shapes: Collection[str]) -> Collection[str]:
    return frozenset(name for name in shapes if names.is_exact(name))
