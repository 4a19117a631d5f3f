"""Linear layers as sums of matmuls, for callers that never materialize the outputs, such as a fused
linear cross-entropy.

T tokens, V outputs, K reduction dimension.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

WeightedRows = tuple[torch.Tensor, torch.Tensor]
"""Inputs [T, K] and a weight [V, K]."""

ScaledProducts = tuple[torch.Tensor | None, Sequence[WeightedRows]]
"""A factor of each output, [V] or None, and the matmuls whose sum it multiplies."""


@runtime_checkable
class LinearTerms(Protocol):
    """Implemented by layers other than `nn.Linear`."""

    def products(self, x: torch.Tensor) -> Sequence[WeightedRows] | None:
        """The matmuls whose sum is the layer's output, or None if it is not such a sum."""
        ...

    def scaled_products(self, x: torch.Tensor) -> Sequence[ScaledProducts] | None:
        """Scaled sums of matmuls that add up to the layer's output, or None if it is not such a
        sum."""
        ...


# Exactly these types: DTensors and quantized tensors are subclasses of tensors too.
# Weights of a dry run are FakeTensors.
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


def linear_terms(layer: object, x: torch.Tensor) -> Sequence[WeightedRows] | None:
    """The matmuls whose sum is a layer's output, or None if it must be computed by calling the
    layer.

    None also for a weight that is sharded (DTensor) or quantized.
    """
    terms = None
    if isinstance(layer, LinearTerms):
        terms = layer.products(x)
    # The class that FSDP makes of nn.Linear is another one with the same forward.
    elif (
        isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and layer.bias is None
    ):
        terms = [(x, layer.weight)]
    return terms if terms and _are_plain_tensors(terms) else None


def scaled_linear_terms(layer: object, x: torch.Tensor) -> Sequence[ScaledProducts] | None:
    """Like `linear_terms`, also for layers whose outputs are scaled, such as DoRA."""
    if not isinstance(layer, LinearTerms):
        terms = linear_terms(layer, x)
        return [(None, terms)] if terms else None
    groups = layer.scaled_products(x)
    return groups if groups and all(_are_plain_tensors(terms) for _, terms in groups) else None


def _are_plain_tensors(products: Sequence[WeightedRows]) -> bool:
    return all(type(matrix) in _PLAIN for _, matrix in products)
