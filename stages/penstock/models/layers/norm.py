"""RMSNorm and LayerNorm modules."""

from typing import overload

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in x's dtype."""

    def __init__(self, width: int, eps: float, *, operations: LayerOps = DEFAULT_LAYER_OPS) -> None:
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
        """The normalized input. With `stream_TD`: the sum of both, and the sum normalized.

        T may be any leading dimensions.
        """
        if stream_TD is None:
            return self.operations.rms_norm(x_TD, self.weight, self.eps)
        return self.operations.add_rms_norm(x_TD, stream_TD, self.weight, self.eps)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension (Ba et al.
    2016), computed in fp32 and returned in x's dtype. With `plus_one` the factor is 1 + weight."""

    def __init__(self, width: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if plus_one else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps, self.plus_one = eps, plus_one

    @overload
    def forward(self, x_TD: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(
        self, x_TD: torch.Tensor, stream_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x_TD: torch.Tensor, stream_TD: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The normalized input. With `stream_TD`: the sum of both, and the sum normalized."""
        if stream_TD is not None:
            sum_TD = stream_TD + x_TD
            return sum_TD, self.forward(sum_TD)
        precise = torch.promote_types(x_TD.dtype, torch.float32)
        weight, bias = self.weight.to(precise), self.bias.to(precise)
        weight = weight + 1 if self.plus_one else weight
        return F.layer_norm(x_TD.to(precise), weight.shape, weight, bias, self.eps).to(x_TD.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def build_norm(config: DecoderConfig, operations: LayerOps) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, as the config defines it."""
    width, eps = config.hidden_size, config.rms_norm_eps
    if config.norm == "rms":
        return RMSNorm(width, eps, operations=operations)
    return LayerNorm(width, eps, plus_one=config.norm == "layer_1p")
