"""Mamba-2 over packed documents (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

T tokens, B documents, D model width; N heads P wide; G groups of B and C, each S wide; C the
channels of the convolution (x, B and C) and W its taps; E features of all heads.
"""

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import DecodeSegments, PrefillSegments
from penstock.models.layers.call_hook import HeadBlocks, OfHeads, of_all_heads
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import GatedRMSNorm
from penstock.models.layers.recurrent.mixer import RecurrentMixer, ShortConvolution
from penstock.models.mamba2_config import Mamba2Config
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.causal_conv1d import causal_conv1d
from penstock_kernels.causal_conv1d import decode_step as convolve_token
from penstock_kernels.linear_attention import decode_step, linear_attention, ssd


class Mamba2(RecurrentMixer):
    """Input projection, convolution, state-space model, norm of the gated output, output
    projection.

    Steps and decays are computed in fp32. Passes with a KV cache keep the last W - 1 inputs of the
    convolution and the state of each sequence.

    `run_core` is a call hook around convolution and state-space model.
    """

    def __init__(self, config: DecoderConfig, *, operations: LayerOps = DEFAULT_LAYER_OPS) -> None:
        super().__init__()
        sizes = config.linear
        assert isinstance(sizes, Mamba2Config)
        self.sizes = sizes
        width, features = config.hidden_size, sizes.features
        self.dt_bias = nn.Parameter(torch.empty(sizes.num_heads))
        self.A_log = nn.Parameter(torch.empty(sizes.num_heads))
        self.D = nn.Parameter(torch.empty(sizes.num_heads))
        self.conv1d = ShortConvolution(
            sum(sizes.channels.values()), sizes.kernel, bias=sizes.conv_bias
        )
        self.in_proj = nn.Linear(width, sum(sizes.projected.values()), bias=sizes.in_bias)
        self.norm = GatedRMSNorm(
            features,
            config.rms_norm_eps,
            group_width=features // sizes.groups,
            norm_first=False,
            operations=operations,
        )
        self.out_proj = nn.Linear(features, width, bias=sizes.out_bias)

    def mix(self, x_TD: torch.Tensor, segments: VarlenMetadata) -> torch.Tensor:
        z_TE, xBC_TC, dt_TN = self._project(x_TD)
        wide = torch.promote_types(dt_TN.dtype, torch.float32)
        steps_TN = F.softplus(dt_TN.to(wide) + self.dt_bias.to(wide))
        # As in transformers: after the softplus.
        steps_TN = steps_TN.clamp(self.sizes.min_step, self.sizes.max_step)
        y_TNP = self.run_core(self._core, xBC_TC, steps_TN, segments)
        return self.out_proj(self.norm(y_TNP.flatten(1), z_TE))

    def _project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # The gate of the output, [T, E]; x, B and C before the convolution, [T, C]; and the steps
        # before their bias, [T, N].
        y_TF = self.in_proj(x_TD)
        # Under tensor parallelism only some heads are here.
        heads = len(self.dt_bias)
        features = heads * self.sizes.head_dim
        return y_TF.split((features, y_TF.shape[-1] - features - heads, heads), dim=-1)

    def head_blocks(self) -> tuple[HeadBlocks, HeadBlocks]:
        # Of the channels of the convolution, and of the steps.
        sizes, heads = self.sizes, len(self.dt_bias)
        groups = (len(self.conv1d.weight) - heads * sizes.head_dim) // (2 * sizes.state_dim)
        shared = groups, sizes.state_dim
        return ((heads, sizes.head_dim), shared, shared), ((heads, 1),)

    def _core(
        self,
        xBC_TC: torch.Tensor,
        steps_TN: torch.Tensor,
        segments: VarlenMetadata,
        of_heads: OfHeads = of_all_heads,
    ) -> torch.Tensor:
        # Outputs of the state-space model, [T, N, P]. States are the last inputs of each document's
        # convolution, [B, W - 1, C], and its last state, [B, N, S, P].
        channels, heads = self.head_blocks()
        taps_CW, bias_C = of_heads(self.conv1d.taps_CW(), channels), self.conv1d.bias
        if bias_C is not None:
            bias_C = of_heads(bias_C, channels)
        rates_N = -of_heads(self.A_log, heads).to(steps_TN.dtype).exp()
        D_N = of_heads(self.D, heads)
        if isinstance(segments, DecodeSegments):
            # One more token of each cached sequence, then padding, whose outputs are zeros.
            tail_BWC, state_BNSP = segments.states()
            rows = len(tail_BWC)
            xBC_BC, tail_BWC = convolve_token(xBC_TC[:rows], taps_CW, bias_C, tail_BWC, "silu")
            x_BNP, B_BGS, C_BGS = self._heads(xBC_BC, steps_TN.shape[1])
            steps_BN = steps_TN[:rows]
            scaled_BNP = (x_BNP * steps_BN.unsqueeze(-1)).to(x_BNP.dtype)
            args = C_BGS, B_BGS, scaled_BNP, steps_BN * rates_N, None, state_BNSP
            y_BNP, state_BNSP = decode_step(*args, 1.0)
            segments.replace_states(tail_BWC, state_BNSP)
            y_BNP = (y_BNP + x_BNP * D_N.unsqueeze(-1)).to(x_BNP.dtype)
            return F.pad(y_BNP, (0, 0, 0, 0, 0, len(xBC_TC) - rows))
        documents = segments.uncached() if isinstance(segments, PrefillSegments) else segments
        xBC_TC, tail_BWC = causal_conv1d(xBC_TC, taps_CW, bias_C, documents, "silu")
        x_TNP, B_TGS, C_TGS = self._heads(xBC_TC, steps_TN.shape[1])
        args = x_TNP, steps_TN, rates_N, B_TGS, C_TGS, documents, D_N
        y_TNP, state_BNSP = ssd(linear_attention, *args)
        if isinstance(segments, PrefillSegments):
            segments.store_states(tail_BWC, state_BNSP)
        return y_TNP

    def _heads(
        self, xBC_TC: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # x, [T, N, P], B and C, [T, G, S].
        sizes = self.sizes
        features = heads * sizes.head_dim
        shared = (xBC_TC.shape[-1] - features) // 2
        x_TE, B_TF, C_TF = xBC_TC.split((features, shared, shared), dim=-1)
        x_TNP = x_TE.unflatten(-1, (-1, sizes.head_dim))
        B_TGS, C_TGS = (part.unflatten(-1, (-1, sizes.state_dim)) for part in (B_TF, C_TF))
        return x_TNP, B_TGS, C_TGS
