"""A model in training under Hugging Face's names, as an export has it, and no checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from penstock.adapters.names import MAGNITUDE, factor_of
from penstock.engine.hf_adapter import adapters_in
from penstock.engine.hf_weights import HfWeights, Tensors, in_checkpoint
from penstock.engine.origin import Adapting
from penstock.engine.quantising import Formats
from penstock.models.weights import WeightMap


@dataclass(frozen=True)
class OfRank:
    """The same tensors, with adapters of a lower rank than the memory that they lie in."""

    tensors: Tensors
    rank: int

    @property
    def folder(self) -> object:
        """Where they are, for errors."""
        return self.tensors.folder

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in self.tensors.shapes().items():
            dim = _dim_of_rank(name)
            if dim is not None:
                shape = (*shape[: len(shape) + dim], self.rank, *shape[len(shape) + dim + 1 :])
            found[name] = shape, dtype
        return found

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Exactly these parameters, whole."""
        read = self.tensors.read(names)
        return {name: self._narrowed(name, tensor) for name, tensor in read.items()}

    def _narrowed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = _dim_of_rank(name)
        # In memory of its own, so that products are the very ones of an adapter that was exported.
        return tensor if dim is None else tensor.narrow(dim, 0, self.rank).contiguous()


def live_weights(
    tensors: Tensors,
    names: WeightMap,
    *,
    adapting: Adapting | None = None,
    formats: Formats | None = None,
) -> HfWeights:
    """All tensors of the model, with its adapters merged where it has such; what `formats` names is
    what its codes stand for."""
    base = in_checkpoint(tensors, names, formats)
    adapters = adapters_in(tensors, names, adapting)
    return adapters.merged_into(base) if adapters else base


def _dim_of_rank(name: str) -> int | None:
    """Which dimension of a factor is the adapter's rank, from the last; None: it has none."""
    factor = factor_of(name)
    if factor is None or factor.side == MAGNITUDE:
        return None
    return -2 if factor.side == "lora_A" else -1
