"""The gated feed-forward network."""

import torch
from torch import nn

from penstock.models.layers.operations import Gate
from penstock_kernels.glu import swiglu


class FeedForward(nn.Module):
    """`down(gate(gate_proj(x), up_proj(x)))`, such as `silu(...) * ...`. T tokens, D model width,
    F feed-forward width."""

    def __init__(self, width: int, inner: int, *, bias: bool, gate: Gate = swiglu) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.gate = gate

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The network's contribution to the residual stream, [T, D]."""
        return self.down_proj(self.gate(self.gate_proj(x_TD), self.up_proj(x_TD)))
