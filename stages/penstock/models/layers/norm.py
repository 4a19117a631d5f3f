"""RMSNorm and LayerNorm modules."""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock_kernels.gated_rms_norm import Activation


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in x's dtype. With `plus_one` the factor is
    1 + weight.

    `mean_squares` is a hook for tensor parallelism: with only a part of the features here, and of
    the weight, it returns the mean square over all features, [T, 1].
    """

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        plus_one: bool = False,
        operations: LayerOps = DEFAULT_LAYER_OPS,
    ) -> None:
        super().__init__()
        # Checkpoints of Gemma's norms store the factor less 1: zeros are the identity there.
        self.weight = nn.Parameter(torch.zeros(width) if plus_one else torch.ones(width))
        self.eps, self.plus_one = eps, plus_one
        self.operations = operations
        self.mean_squares: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x_TD: torch.Tensor, stream_TD: torch.Tensor | None = None) -> Any:
        """The normalized input. With `stream_TD`: the sum of both, and the sum normalized.

        T may be any leading dimensions.
        """
        if self.mean_squares is not None:
            assert stream_TD is None, "only norms within attention are split"
            return self._split(x_TD, self.mean_squares)
        if stream_TD is None:
            return self.operations.rms_norm(x_TD, self.weight, self.eps, self.plus_one)
        return self.operations.add_rms_norm(x_TD, stream_TD, self.weight, self.eps, self.plus_one)

    def _split(
        self, x_TD: torch.Tensor, mean_squares: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        # fp32, or fp64 for inputs in fp64.
        wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        normed_TD = wide_TD * torch.rsqrt(mean_squares(wide_TD) + self.eps)
        # As in transformers Gemma's norms are rounded after the factor, Llama's before it.
        if self.plus_one:
            return (normed_TD * (1 + self.weight.to(normed_TD.dtype))).to(x_TD.dtype)
        return self.weight.to(x_TD.dtype) * normed_TD.to(x_TD.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(nn.Module):
    """`x / rms(x) * weight * silu(gate)` over the last dimension, in x's dtype, or with another
    activation of the gate; with `norm_first=False` instead x * silu(gate) is normalized, and then
    multiplied by weight. Each `group_width` features are normalized alone.

    `mean_squares` is a hook for tensor parallelism, as in `RMSNorm`, where a group is on several
    ranks.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        activation: Activation = "silu",
        group_width: int | None = None,
        norm_first: bool = True,
        operations: LayerOps = DEFAULT_LAYER_OPS,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.activation, self.operations = eps, activation, operations
        self.group_width, self.norm_first = group_width or width, norm_first
        self.mean_squares: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """The normalized and gated input. T may be any leading dimensions."""
        if self.mean_squares is not None:
            return self._split(x_TD, gate_TD, self.mean_squares)
        settings = self.activation, self.norm_first, len(self.weight) // self.group_width
        return self.operations.gated_rms_norm(x_TD, gate_TD, self.weight, self.eps, *settings)

    def _split(
        self,
        x_TD: torch.Tensor,
        gate_TD: torch.Tensor,
        mean_squares: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        # The same with a part of one group here.
        # Only norms of `MAMBA_ROLES` are split, and their gates are SiLU.
        assert self.activation == "silu"
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        gate_TD, wide_TD = F.silu(gate_TD.to(wide)), x_TD.to(wide)
        if not self.norm_first:
            wide_TD = wide_TD * gate_TD
        normed_TD = wide_TD * torch.rsqrt(mean_squares(wide_TD) + self.eps)
        y_TD = self.weight.to(x_TD.dtype) * normed_TD.to(x_TD.dtype)
        return (y_TD * gate_TD).to(x_TD.dtype) if self.norm_first else y_TD


class NoNorm(nn.Module):
    """The identity, where a family has no norm."""

    def forward(self, x_TD: torch.Tensor, stream_TD: torch.Tensor | None = None) -> Any:
        """The input. With `stream_TD`: the sum of both, twice."""
        if stream_TD is None:
            return x_TD
        sum_TD = stream_TD + x_TD
        return sum_TD, sum_TD


class LayerNorm(nn.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension (Ba et al.
    2016), computed in fp32 and returned in x's dtype. With `plus_one` the factor is 1 + weight.
    `parameters` are those of weight and bias that there are."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        plus_one: bool = False,
        parameters: Collection[str] = ("weight", "bias"),
    ) -> None:
        super().__init__()
        start = torch.zeros(width) if plus_one else torch.ones(width)
        self.weight = nn.Parameter(start) if "weight" in parameters else None
        self.bias = nn.Parameter(torch.zeros(width)) if "bias" in parameters else None
        self.width, self.eps, self.plus_one = width, eps, plus_one

    def forward(self, x_TD: torch.Tensor, stream_TD: torch.Tensor | None = None) -> Any:
        """The normalized input. With `stream_TD`: the sum of both, and the sum normalized."""
        if stream_TD is not None:
            sum_TD = stream_TD + x_TD
            return sum_TD, self.forward(sum_TD)
        precise = torch.promote_types(x_TD.dtype, torch.float32)
        weight, bias = (
            None if parameter is None else parameter.to(precise)
            for parameter in (self.weight, self.bias)
        )
        if weight is not None and self.plus_one:
            weight = weight + 1
        normed_TD = F.layer_norm(x_TD.to(precise), (self.width,), weight, bias, self.eps)
        return normed_TD.to(x_TD.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


def unit_rms_norm(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x)` over the last dimension, computed in fp32 and returned in x's dtype."""
    wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    return F.rms_norm(wide_TD, wide_TD.shape[-1:], eps=eps).to(x_TD.dtype)


def build_norm(config: DecoderConfig, operations: LayerOps) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, as the config defines it."""
    width, eps = config.hidden_size, config.rms_norm_eps
    if config.norm in ("rms", "rms_1p"):
        return RMSNorm(width, eps, plus_one=config.norm == "rms_1p", operations=operations)
    plus_one = config.norm == "layer_1p"
    return LayerNorm(width, eps, plus_one=plus_one, parameters=config.norm_parameters)


def build_qk_norm(config: DecoderConfig, heads: int, operations: LayerOps) -> RMSNorm:
    """The norm of queries or keys with so many heads."""
    width = config.head_dim * (heads if config.qk_norm_over == "projection" else 1)
    plus_one = config.norm == "rms_1p"
    return RMSNorm(width, config.rms_norm_eps, plus_one=plus_one, operations=operations)
