"""Layers that are sums of products, for whoever multiplies for them and never holds their outputs.

T tokens, V outputs, K the width that a product is summed over.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

WeightedRows = tuple[torch.Tensor, torch.Tensor]
"""Rows [T, K] and a matrix [V, K]."""

ScaledProducts = tuple[torch.Tensor | None, Sequence[WeightedRows]]
"""A factor for each output, [V], or none, and the products whose sum it multiplies."""


@runtime_checkable
class LinearTerms(Protocol):
    """What a layer of a class of its own may say of itself."""

    def products(self, x: torch.Tensor) -> Sequence[WeightedRows] | None:
        """The products that add up to the layer's outputs, or None if it does more."""
        ...

    def scaled_products(self, x: torch.Tensor) -> Sequence[ScaledProducts] | None:
        """Sums of products that add up to them, each times its factor, or None if it does more."""
        ...


def linear_terms(layer: object, x: torch.Tensor) -> Sequence[WeightedRows] | None:
    """The products of which a layer's outputs are the sum, or None where only the layer knows.

    A weight that is not here as it is, in parts or quantised, only the layer can use.
    """
    found = None
    if isinstance(layer, LinearTerms):
        found = layer.products(x)
    elif type(layer) is nn.Linear and layer.bias is None:
        found = [(x, layer.weight)]
    return found if found and _are_here(found) else None


def scaled_linear_terms(layer: object, x: torch.Tensor) -> Sequence[ScaledProducts] | None:
    """The same of layers whose outputs have factors too, such as those of trained norms."""
    if not isinstance(layer, LinearTerms):
        found = linear_terms(layer, x)
        return [(None, found)] if found else None
    groups = layer.scaled_products(x)
    return groups if groups and all(_are_here(found) for _, found in groups) else None


def _are_here(products: Sequence[WeightedRows]) -> bool:
    return all(type(matrix) in (torch.Tensor, nn.Parameter) for _, matrix in products)
