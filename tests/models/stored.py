"""Native tensors as a checkpoint stores them, and back: whole, and in one process."""

from collections.abc import Callable

import torch

from penstock.models.weights import WeightMap


def to_hf(names: WeightMap, native: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose rows, one after another, are the native one's."""
    shapes = {name: names.hf_shapes()[name] for name in names.hf_names(native)}
    rest = next(iter(shapes.values()))[1:]
    rows = tensor.reshape(-1, *rest).split([shape[0] for shape in shapes.values()])
    return dict(zip(shapes, rows, strict=True))


def from_hf(names: WeightMap, native: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The native tensor, of checkpoint tensors that `read` fetches by name."""
    parts = [read(name) for name in names.hf_names(native)]
    return torch.cat(parts).view(names.native_shape(native))
