"""Feed-forward networks, gated (SwiGLU, GeGLU) or not.

T tokens, D model width, F feed-forward width.
"""

from collections.abc import Callable

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.dropout import Dropout
from penstock.models.layers.layer_ops import ACTIVATIONS, Gate, LayerOps
from penstock_kernels.glu import swiglu


class FeedForward(nn.Module):
    """Gated MLP: `down(drop(gate(gate_proj(x), up_proj(x))))`, where the gate is e.g. SwiGLU."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        bias: bool,
        gate: Gate = swiglu,
        drop: Dropout | None = None,
    ) -> None:
        """`drop=None`: no dropout."""
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.gate = gate
        self.dropout = drop

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]."""
        y_TF = self.gate(self.gate_proj(x_TD), self.up_proj(x_TD))
        return self.down_proj(y_TF if self.dropout is None else self.dropout(y_TF))


class FusedFeedForward(nn.Module):
    """Gated MLP whose gate and up projections are one layer:
    `down(drop(gate(gate_up_proj(x))))`."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        bias: bool,
        gate: Callable[[torch.Tensor], torch.Tensor],
        drop: Dropout | None = None,
    ) -> None:
        """`gate` takes rows [2 F] that hold gate and up. `drop=None`: no dropout."""
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.gate = gate
        self.dropout = drop

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]."""
        y_TF = self.gate(self.gate_up_proj(x_TD))
        return self.down_proj(y_TF if self.dropout is None else self.dropout(y_TF))


class PlainFeedForward(nn.Module):
    """MLP without a gate: `down(drop(activation(up_proj(x))))`."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        bias: bool,
        activation: Callable[[torch.Tensor], torch.Tensor],
        drop: Dropout | None = None,
    ) -> None:
        """`drop=None`: no dropout."""
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = activation
        self.dropout = drop

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]."""
        y_TF = self.activation(self.up_proj(x_TD))
        return self.down_proj(y_TF if self.dropout is None else self.dropout(y_TF))


def build_feed_forward(
    config: DecoderConfig, inner: int, operations: LayerOps, drop: Dropout | None = None
) -> FeedForward | FusedFeedForward | PlainFeedForward:
    """An MLP as the config defines it, of this intermediate size."""
    sizes = config.hidden_size, inner
    if config.fused_gate_up:
        gate = operations.packed_gate(config.activation)
        return FusedFeedForward(*sizes, bias=config.mlp_bias, gate=gate, drop=drop)
    if config.gated:
        gate = operations.gates[config.activation]
        return FeedForward(*sizes, bias=config.mlp_bias, gate=gate, drop=drop)
    activation = ACTIVATIONS[config.activation]
    return PlainFeedForward(*sizes, bias=config.mlp_bias, activation=activation, drop=drop)
