"""Gated DeltaNet, the linear attention of Qwen3-Next (https://arxiv.org/abs/2412.06464).

T tokens, D hidden size; G heads of queries and keys, K wide, and N heads of values, V wide. No
family uses it yet.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.causal_conv1d import causal_conv1d
from penstock_kernels.gated_rms_norm import gated_rms_norm
from penstock_kernels.linear_attention import linear_attention


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Sizes of a layer."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel_size: int
    """Taps of the convolution."""
    eps: float


class GatedDeltaNet(nn.Module):
    """Parameters are named and laid out as in Hugging Face's Qwen3NextGatedDeltaNet: projections
    hold queries, keys, values and gates of each key head, one after another.
    """

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.config = config
        keys = config.key_heads * config.key_width
        values = config.value_heads * config.value_width
        channels = 2 * keys + values
        self.in_proj_qkvz = nn.Linear(config.hidden_size, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * config.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.kernel_size, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(config.value_heads))
        self.A_log = nn.Parameter(torch.zeros(config.value_heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config.value_width))
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def forward(self, x_TD: torch.Tensor, segments: VarlenMetadata) -> torch.Tensor:
        """[T, D]: each document of a packed micro-batch by itself."""
        config = self.config
        q_TGK, k_TGK, v_TNV, z_TNV = self._projected(x_TD)
        mixed_TC = torch.cat([one.flatten(1) for one in (q_TGK, k_TGK, v_TNV)], dim=1)
        taps_CW = self.conv1d.weight.squeeze(1)
        mixed_TC, _ = causal_conv1d(mixed_TC, taps_CW, None, segments, "silu")
        sizes = [one.flatten(1).shape[1] for one in (q_TGK, k_TGK, v_TNV)]
        q_TC, k_TC, v_TC = mixed_TC.split(sizes, dim=1)
        q_TGK, k_TGK = (_l2_norm(one.view_as(q_TGK)) for one in (q_TC, k_TC))
        beta_TN, log_decay_TN = self._rates(x_TD)
        y_TNV, _ = linear_attention(
            q_TGK,
            k_TGK,
            v_TC.view_as(v_TNV),
            log_decay_TN,
            beta_TN,
            segments,
            config.key_width**-0.5,
        )
        y_TNV = gated_rms_norm(y_TNV, z_TNV, self.norm.get_parameter("weight"), config.eps)
        return self.out_proj(y_TNV.flatten(1))

    def _projected(
        self, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values and gates."""
        config = self.config
        of_each = config.value_heads // config.key_heads * config.value_width
        by_head = self.in_proj_qkvz(x_TD).unflatten(1, (config.key_heads, -1))
        widths = [config.key_width, config.key_width, of_each, of_each]
        q_TGK, k_TGK, v, z = by_head.split(widths, dim=2)
        shape = len(x_TD), config.value_heads, config.value_width
        return q_TGK, k_TGK, v.reshape(shape), z.reshape(shape)

    def _rates(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rate of the delta rule, and log decays in fp32."""
        by_head = self.in_proj_ba(x_TD).unflatten(1, (self.config.key_heads, 2, -1))
        b_TN, a_TN = (one.flatten(1) for one in by_head.unbind(2))
        log_decay_TN = -self.A_log.float().exp() * F.softplus(a_TN.float() + self.dt_bias)
        return b_TN.sigmoid(), log_decay_TN


def _l2_norm(x_TGK: torch.Tensor) -> torch.Tensor:
    """In fp32, as Hugging Face's; rounded to x's dtype."""
    wide = x_TGK.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x_TGK.dtype)
