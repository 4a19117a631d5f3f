"""Kimi Delta Attention over packed documents.

T tokens, D model width, N heads, K and V the widths of a key and of a value, C the channels of the
convolution.
"""

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.call_hook import HeadBlocks, OfHeads
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import GatedRMSNorm
from penstock.models.layers.recurrent.gated_delta_net import GatedDeltaNet
from penstock.models.linear_config import KimiDeltaConfig


class KimiDeltaAttention(GatedDeltaNet):
    """`GatedDeltaNet` with a decay for each channel of a key, and the sigmoid of its gate."""

    def __init__(self, config: DecoderConfig, *, operations: LayerOps = DEFAULT_LAYER_OPS) -> None:
        super().__init__(config, operations=operations)
        sizes = self.sizes
        self.norm = GatedRMSNorm(
            sizes.value_dim, config.rms_norm_eps, activation="sigmoid", operations=operations
        )

    def _add_projections(self, width: int) -> None:
        sizes = self.sizes
        assert isinstance(sizes, KimiDeltaConfig)
        inner, channels = sizes.key_dim, sizes.channels
        self.in_proj_qkv = nn.Linear(width, sum(channels.values()), bias=False)
        self.in_proj_b = nn.Linear(width, sizes.value_heads, bias=False)
        self.f_a_proj = nn.Linear(width, inner, bias=False)
        self.f_b_proj = nn.Linear(inner, channels["k"], bias=False)
        self.g_a_proj = nn.Linear(width, inner, bias=False)
        self.g_b_proj = nn.Linear(inner, channels["v"], bias=False)

    def _project(
        self, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before the convolution, [T, C]; the gate of the output, [T, N,
        V]; the rate of the delta rule before its sigmoid, [T, N], and the step before dt_bias, [T,
        N K]."""
        z_TNV = self.g_b_proj(self.g_a_proj(x_TD)).unflatten(-1, (-1, self.sizes.value_dim))
        steps_TE = self.f_b_proj(self.f_a_proj(x_TD))
        return self.in_proj_qkv(x_TD), z_TNV, self.in_proj_b(x_TD), steps_TE

    def head_blocks(self) -> tuple[HeadBlocks, HeadBlocks, HeadBlocks]:
        # Of the channels of the convolution, and of rates and steps.
        heads = len(self.dt_bias) // self.sizes.key_dim
        channels = heads, self.sizes.key_dim
        return (channels, channels, channels), ((heads, 1),), (channels,)

    def _log_decay_TN(self, a_TN: torch.Tensor, of_heads: OfHeads) -> torch.Tensor:  # noqa: N802
        """[T, N, K], of steps [T, N K]."""
        wide = torch.promote_types(a_TN.dtype, torch.float32)
        _, of_rates, of_steps = self.head_blocks()
        bias_E = of_heads(self.dt_bias, of_steps).to(wide)
        A_log_N = of_heads(self.A_log.flatten(), of_rates).to(wide)
        steps_TNK = F.softplus(a_TN.to(wide) + bias_E).unflatten(-1, (len(A_log_N), -1))
        return -A_log_N.exp().unsqueeze(-1) * steps_TNK
