"""One pre-norm residual block."""

import torch
from torch import nn

from penstock.models.layers.attention import Attend, SelfAttention
from penstock.models.layers.dropout import Dropout
from penstock.models.layers.experts import ExpertOperations
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.mixture import MixtureOfExperts
from penstock.models.layers.norm import RMSNorm
from penstock.models.layers.router import Precision
from penstock.models.layers.run import Run, direct
from penstock.models.shape import DecoderConfig
from penstock_kernels.attention import Segments

SOCKETS = {"self_attn": "run_attn", "mlp": "run_mlp"}
"""The two parts of a block, and the sockets that they are called through."""


class Block(nn.Module):
    """Attention and feed-forward, each normalised before, and dropped from and added after; what
    feeds forward is one network or a mixture of experts.

    `run_attn` and `run_mlp` are sockets: whoever plugs one calls what was plugged before.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        merge_qkv: bool,
        attend: Attend,
        operations: ExpertOperations,
        router: Precision,
        dropout: float = 0.0,
    ) -> None:
        """`dropout`: the rate at which features are dropped from what is added to the stream."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, merge_qkv=merge_qkv, attend=attend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        experts = config.experts_of(layer)
        self.mlp = (
            MixtureOfExperts(config, experts, operations=operations, router=router)
            if experts
            else FeedForward(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        )
        self.drop_attn, self.drop_mlp = (
            Dropout(dropout, f"model.layers.{layer}.{part}") for part in SOCKETS
        )
        self.run_attn: Run = direct
        self.run_mlp: Run = direct

    def forward(
        self, x_TD: torch.Tensor, cos_TH: torch.Tensor, sin_TH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """The residual stream after this block, [T, D]."""
        normed_TD = self.input_layernorm(x_TD)
        attended_TD = self.run_attn(self.self_attn, normed_TD, cos_TH, sin_TH, segments)
        x_TD = x_TD + self.drop_attn(attended_TD)
        return x_TD + self.drop_mlp(self.run_mlp(self.mlp, self.post_attention_layernorm(x_TD)))
