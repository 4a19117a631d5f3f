"""RMS normalisation as a module."""

import torch
from torch import nn

from penstock_kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Normalise. T may be any leading dimensions."""
        return rms_norm(x_TD, self.weight, self.eps)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
