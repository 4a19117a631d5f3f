"""RMS normalisation as a module."""

from typing import overload

import torch
from torch import nn

from penstock.models.layers.operations import BEST_OPERATIONS, Operations


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in x's dtype."""

    def __init__(self, width: int, eps: float, *, operations: Operations = BEST_OPERATIONS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.operations = operations

    @overload
    def forward(self, x_TD: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(
        self, x_TD: torch.Tensor, stream_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x_TD: torch.Tensor, stream_TD: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise; or add to a stream, and give the sum and the sum normalised.

        T may be any leading dimensions.
        """
        if stream_TD is None:
            return self.operations.rms_norm(x_TD, self.weight, self.eps)
        return self.operations.add_rms_norm(x_TD, stream_TD, self.weight, self.eps)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
