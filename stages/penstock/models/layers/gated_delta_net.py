"""Gated DeltaNet: linear attention over packed documents.

T tokens, B documents, D model width; G key heads and N value heads; K and V the widths of a key and
of a value; C the channels of the convolution (queries, keys and values) and W its taps.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import DecodeSegments, PrefillSegments
from penstock.models.layers.call_hook import call
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import GatedRMSNorm
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.causal_conv1d import causal_conv1d
from penstock_kernels.causal_conv1d import decode_step as convolve_token
from penstock_kernels.linear_attention import decode_step, linear_attention

L2_EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers and FLA."""


class ShortConvolution(nn.Module):
    """The weight of a depthwise convolution, in the shape of `nn.Conv1d`'s."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    def taps_CW(self) -> torch.Tensor:  # noqa: N802 - C and W name the dimensions
        """The taps of each channel, [C, W]."""
        return self.weight.squeeze(1)


class GatedDeltaNet(nn.Module):
    """Input projections, convolution, the gated delta rule, gated norm, output projection.

    Decays are computed in fp32, as in transformers. Passes with a KV cache keep the last W - 1
    inputs of the convolution and the state of each sequence.

    `run_core` is a call hook around convolution and delta rule.
    """

    def __init__(self, config: DecoderConfig, *, operations: LayerOps = DEFAULT_LAYER_OPS) -> None:
        super().__init__()
        sizes = config.linear
        assert sizes is not None
        self.sizes = sizes
        width, channels = config.hidden_size, sizes.channels
        values, heads = channels["v"], sizes.value_heads
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.conv1d = ShortConvolution(sum(channels.values()), sizes.kernel)
        if sizes.fused:
            self.in_proj_qkvz = nn.Linear(width, sum(channels.values()) + values, bias=False)
            self.in_proj_ba = nn.Linear(width, 2 * heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(width, sum(channels.values()), bias=False)
            self.in_proj_z = nn.Linear(width, values, bias=False)
            self.in_proj_b = nn.Linear(width, heads, bias=False)
            self.in_proj_a = nn.Linear(width, heads, bias=False)
        self.norm = GatedRMSNorm(sizes.value_dim, config.rms_norm_eps, operations=operations)
        self.out_proj = nn.Linear(values, width, bias=False)
        self.run_core: Callable[..., torch.Tensor] = call

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TH: torch.Tensor,
        sin_TH: torch.Tensor,
        segments: VarlenMetadata,
        query_scale_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output, which is added to the residual stream, [T, D]. There is no RoPE."""
        del cos_TH, sin_TH, query_scale_T
        assert segments.start_rows is None, "a state has all of a document's past"
        qkv_TC, z_TNV, b_TN, a_TN = self._project(x_TD)
        wide = torch.promote_types(a_TN.dtype, torch.float32)
        steps_TN = F.softplus(a_TN.to(wide) + self.dt_bias.to(wide))
        log_decay_TN = -self.A_log.to(wide).exp() * steps_TN
        core = self._core
        if isinstance(segments, PrefillSegments):
            core = self._prefill
        elif isinstance(segments, DecodeSegments):
            core = self._decode
        y_TNV = self.run_core(core, qkv_TC, log_decay_TN, b_TN.sigmoid(), segments)
        return self.out_proj(self.norm(y_TNV, z_TNV).flatten(1))

    def _project(
        self, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before the convolution, [T, C]; the gate of the output, [T, N,
        V]; the rate of the delta rule before its sigmoid, and the step before dt_bias, [T, N]."""
        sizes = self.sizes
        if not sizes.fused:
            z_TNV = self.in_proj_z(x_TD).unflatten(-1, (-1, sizes.value_dim))
            return self.in_proj_qkv(x_TD), z_TNV, self.in_proj_b(x_TD), self.in_proj_a(x_TD)
        # -1 for key heads: under tensor parallelism only some are here.
        features, shared = sizes.group_channels, sizes.values_per_key
        qkvz_TGE = self.in_proj_qkvz(x_TD).unflatten(-1, (-1, sum(features) + features[-1]))
        *qkv, z_TGE = qkvz_TGE.split((*features, features[-1]), dim=-1)
        b_TGS, a_TGS = self.in_proj_ba(x_TD).unflatten(-1, (-1, 2 * shared)).chunk(2, dim=-1)
        z_TNV = z_TGE.flatten(1).unflatten(-1, (-1, sizes.value_dim))
        qkv_TC = torch.cat([part.flatten(1) for part in qkv], dim=-1)
        return qkv_TC, z_TNV, b_TGS.flatten(1), a_TGS.flatten(1)

    def _core(
        self,
        qkv_TC: torch.Tensor,
        log_decay_TN: torch.Tensor,
        beta_TN: torch.Tensor,
        segments: VarlenMetadata,
    ) -> torch.Tensor:
        """Outputs of the delta rule, [T, N, V]."""
        return self._with_states(qkv_TC, log_decay_TN, beta_TN, segments)[0]

    def _with_states(
        self,
        qkv_TC: torch.Tensor,
        log_decay_TN: torch.Tensor,
        beta_TN: torch.Tensor,
        segments: VarlenMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The outputs; the last inputs of each document's convolution, [B, W - 1, C], and its last
        state, [B, N, K, V]."""
        weight_CW = self.conv1d.taps_CW()
        qkv_TC, tail_BWC = causal_conv1d(qkv_TC, weight_CW, None, segments, "silu")
        q_TGK, k_TGK, v_TNV = self._heads(qkv_TC)
        args = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, segments, self.sizes.key_dim**-0.5
        y_TNV, state_BNKV = linear_attention(*args)
        return y_TNV, tail_BWC, state_BNKV

    def _prefill(
        self,
        qkv_TC: torch.Tensor,
        log_decay_TN: torch.Tensor,
        beta_TN: torch.Tensor,
        segments: PrefillSegments,
    ) -> torch.Tensor:
        """The same, whose states are cached."""
        args = qkv_TC, log_decay_TN, beta_TN, segments.uncached()
        y_TNV, *states = self._with_states(*args)
        segments.store_states(*states)
        return y_TNV

    def _decode(
        self,
        qkv_TC: torch.Tensor,
        log_decay_TN: torch.Tensor,
        beta_TN: torch.Tensor,
        segments: DecodeSegments,
    ) -> torch.Tensor:
        """One more token of each cached sequence, then padding, whose outputs are zeros."""
        tail_BWC, state_BNKV = segments.states()
        rows = len(tail_BWC)
        qkv_BC, tail_BWC = convolve_token(
            qkv_TC[:rows], self.conv1d.taps_CW(), None, tail_BWC, "silu"
        )
        q_BGK, k_BGK, v_BNV = self._heads(qkv_BC)
        args = q_BGK, k_BGK, v_BNV, log_decay_TN[:rows], beta_TN[:rows], state_BNKV
        y_BNV, state_BNKV = decode_step(*args, self.sizes.key_dim**-0.5)
        segments.replace_states(tail_BWC, state_BNKV)
        return F.pad(y_BNV, (0, 0, 0, 0, 0, len(qkv_TC) - rows))

    def _heads(self, qkv_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys of length 1, [T, G, K], and values, [T, N, V]."""
        sizes = self.sizes
        heads = qkv_TC.shape[-1] // sum(sizes.group_channels)
        channels = [heads * count for count in sizes.group_channels]
        q_TE, k_TE, v_TE = qkv_TC.split(channels, dim=-1)
        q_TGK, k_TGK = (x.unflatten(-1, (heads, sizes.key_dim)) for x in (q_TE, k_TE))
        v_TNV = v_TE.unflatten(-1, (-1, sizes.value_dim))
        return _unit_length(q_TGK), _unit_length(k_TGK), v_TNV


def _unit_length(x_TGK: torch.Tensor) -> torch.Tensor:
    """`x / |x|` over the last dimension, computed in fp32 and returned in x's dtype."""
    wide_TGK = x_TGK.to(torch.promote_types(x_TGK.dtype, torch.float32))
    squares_TG1 = wide_TGK.square().sum(-1, keepdim=True)
    return (wide_TGK * torch.rsqrt(squares_TG1 + L2_EPS)).to(x_TGK.dtype)
