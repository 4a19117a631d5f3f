"""Feed-forward networks, gated (SwiGLU, GeGLU) or not.

T tokens, D model width, F feed-forward width.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.dropout import Dropout
from penstock.models.layers.joint_linear import project
from penstock.models.layers.layer_ops import ACTIVATIONS, LayerOps


class FeedForward(nn.Module):
    """Gated MLP: `down_proj(drop(activation(gate_proj(x), up_proj(x))))`, where the activation is
    e.g. SwiGLU."""

    projections: ClassVar[Mapping[str, int]] = {"gate_proj": 1, "up_proj": 1}
    """The input projections, and how many times F features each of them has."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        bias: bool,
        activation: Callable[..., torch.Tensor],
        drop: Dropout | None = None,
    ) -> None:
        super().__init__()
        for name, count in self.projections.items():
            self.add_module(name, nn.Linear(width, count * inner, bias=bias))
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = activation
        self.dropout = drop

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]."""
        y_TF = self.activation(*project(x_TD, *(getattr(self, name) for name in self.projections)))
        return self.down_proj(y_TF if self.dropout is None else self.dropout(y_TF))


class FusedFeedForward(FeedForward):
    """Gated MLP whose gate and up projections are one layer, of which the activation takes rows
    [2 F]."""

    projections: ClassVar = {"gate_up_proj": 2}


class PlainFeedForward(FeedForward):
    """MLP without a gate."""

    projections: ClassVar = {"up_proj": 1}


def build_feed_forward(
    config: DecoderConfig, inner: int, operations: LayerOps, drop: Dropout | None = None
) -> FeedForward:
    """An MLP as the config defines it, of this intermediate size."""
    if config.fused_gate_up:
        kind, activation = FusedFeedForward, operations.packed_gate(config.activation)
    elif config.gated:
        kind, activation = FeedForward, operations.gates[config.activation]
    else:
        kind, activation = PlainFeedForward, ACTIVATIONS[config.activation]
    bias = config.mlp_bias
    return kind(config.hidden_size, inner, bias=bias, activation=activation, drop=drop)
