"""Linear layers that share an input, such as the projections to queries, keys and values.

T tokens, K features of the input.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn


class JointLinear(ABC):
    """A base class of linear layers that have products in common with others of the same input."""

    @abstractmethod
    def forward_jointly(
        self, x_TK: torch.Tensor, layers: Sequence[nn.Module]
    ) -> Sequence[torch.Tensor] | None:
        """The outputs of `layers`, of which this is the first; None if they must be called one
        after another."""


def project(x_TK: torch.Tensor, *layers: nn.Module) -> Sequence[torch.Tensor]:
    """The outputs of linear layers of one input."""
    first = layers[0]
    if len(layers) > 1 and isinstance(first, JointLinear) and not torch.compiler.is_compiling():
        outputs = first.forward_jointly(x_TK, layers)
        if outputs is not None:
            return outputs
    return [layer(x_TK) for layer in layers]
