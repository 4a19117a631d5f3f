"""One pre-norm residual block, and the way its parts are called."""

from typing import Any, Protocol

import torch
from torch import nn

from penstock.models.layers.attention import Attend, SelfAttention
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.norm import RMSNorm
from penstock.models.shape import DecoderConfig
from penstock_kernels.attention import Segments


class Run(Protocol):
    """A way to call a module: at once, or such that it is computed again in the backward pass."""

    def __call__(self, module: nn.Module, /, *args: Any) -> torch.Tensor: ...


def direct(module: nn.Module, /, *args: Any) -> torch.Tensor:
    """Call it. The default of every `run_…` socket."""
    return module(*args)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after.

    `run_attn` and `run_mlp` are sockets for recomputation.
    """

    def __init__(self, config: DecoderConfig, *, merge_qkv: bool, attend: Attend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, merge_qkv=merge_qkv, attend=attend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)
        self.run_attn: Run = direct
        self.run_mlp: Run = direct

    def forward(
        self, x_TD: torch.Tensor, cos_TH: torch.Tensor, sin_TH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """The residual stream after this block, [T, D]."""
        normed_TD = self.input_layernorm(x_TD)
        x_TD = x_TD + self.run_attn(self.self_attn, normed_TD, cos_TH, sin_TH, segments)
        return x_TD + self.run_mlp(self.mlp, self.post_attention_layernorm(x_TD))
