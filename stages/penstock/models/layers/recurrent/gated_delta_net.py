"""Gated DeltaNet and Kimi Delta Attention: linear attention over packed documents.

T tokens, B documents, D model width; G key heads and N value heads; K and V the widths of a key and
of a value; C the channels of the convolution (queries, keys and values) and W its taps.
"""

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import DecodeSegments, PrefillSegments
from penstock.models.layers.call_hook import HeadBlocks, OfHeads, of_all_heads
from penstock.models.layers.joint_linear import project
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import GatedRMSNorm
from penstock.models.layers.recurrent.mixer import RecurrentMixer, ShortConvolution
from penstock.models.linear_config import GatedDeltaConfig, KimiDeltaConfig
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.causal_conv1d import causal_conv1d
from penstock_kernels.causal_conv1d import decode_step as convolve_token
from penstock_kernels.linear_attention import decode_step, linear_attention

# Added to the squared length of queries and keys, as in transformers and FLA.
L2_EPS = 1e-6


class GatedDeltaNet(RecurrentMixer):
    """Input projections, convolution, the gated delta rule, gated norm, output projection.

    Decays are computed in fp32, as in transformers. Passes with a KV cache keep the last W - 1
    inputs of the convolution and the state of each sequence.

    `run_core` is a call hook around convolution, decays and delta rule.
    """

    def __init__(self, config: DecoderConfig, *, operations: LayerOps = DEFAULT_LAYER_OPS) -> None:
        super().__init__()
        sizes = config.linear
        assert isinstance(sizes, GatedDeltaConfig)
        self.sizes = sizes
        width, channels = config.hidden_size, sizes.channels
        shapes = sizes.shapes(width)
        self.dt_bias = nn.Parameter(torch.empty(shapes["dt_bias"]))
        self.A_log = nn.Parameter(torch.empty(shapes["A_log"]))
        self.conv1d = ShortConvolution(sum(channels.values()), sizes.kernel)
        self._add_projections(width)
        eps = config.rms_norm_eps if sizes.norm_eps is None else sizes.norm_eps
        self.norm = GatedRMSNorm(sizes.value_dim, eps, operations=operations)
        self.out_proj = nn.Linear(channels["v"], width, bias=False)

    def _add_projections(self, width: int) -> None:
        sizes, channels = self.sizes, self.sizes.channels
        values, heads = channels["v"], sizes.value_heads
        if sizes.fused:
            self.in_proj_qkvz = nn.Linear(width, sum(channels.values()) + values, bias=False)
            self.in_proj_ba = nn.Linear(width, 2 * heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(width, sum(channels.values()), bias=False)
            self.in_proj_z = nn.Linear(width, values, bias=False)
            self.in_proj_b = nn.Linear(width, heads, bias=False)
            self.in_proj_a = nn.Linear(width, heads, bias=False)

    def mix(self, x_TD: torch.Tensor, segments: VarlenMetadata) -> torch.Tensor:
        qkv_TC, z_TNV, b_TN, a_TN = self._project(x_TD)
        y_TNV = self.run_core(self._core, qkv_TC, b_TN, a_TN, segments)
        return self.out_proj(self.norm(y_TNV, z_TNV).flatten(1))

    def _project(
        self, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        # Queries, keys and values before the convolution, [T, C]; the gate of the output, [T, N,
        # V]; the rate of the delta rule before its sigmoid, and the step before dt_bias, [T, N].
        sizes = self.sizes
        if not sizes.fused:
            layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
            qkv_TC, z_TE, b_TN, a_TN = project(x_TD, *layers)
            return qkv_TC, z_TE.unflatten(-1, (-1, sizes.value_dim)), b_TN, a_TN
        # -1 for key heads: under tensor parallelism only some are here.
        features, shared = sizes.group_channels, sizes.values_per_key
        qkvz_TGE = self.in_proj_qkvz(x_TD).unflatten(-1, (-1, sum(features) + features[-1]))
        *qkv, z_TGE = qkvz_TGE.split((*features, features[-1]), dim=-1)
        b_TGS, a_TGS = self.in_proj_ba(x_TD).unflatten(-1, (-1, 2 * shared)).chunk(2, dim=-1)
        z_TNV = z_TGE.flatten(1).unflatten(-1, (-1, sizes.value_dim))
        qkv_TC = torch.cat([part.flatten(1) for part in qkv], dim=-1)
        return qkv_TC, z_TNV, b_TGS.flatten(1), a_TGS.flatten(1)

    def head_blocks(self) -> tuple[HeadBlocks, HeadBlocks, HeadBlocks]:
        # Of the channels of the convolution, and of b and a.
        sizes, values = self.sizes, len(self.dt_bias)
        keys = values // sizes.values_per_key, sizes.key_dim
        return (keys, keys, (values, sizes.value_dim)), ((values, 1),), ((values, 1),)

    def _core(
        self,
        qkv_TC: torch.Tensor,
        b_TN: torch.Tensor,
        a_TN: torch.Tensor,
        segments: VarlenMetadata,
        of_heads: OfHeads = of_all_heads,
    ) -> torch.Tensor:
        # Outputs of the delta rule, [T, N, V]. States are the last inputs of each document's
        # convolution, [B, W - 1, C], and its last state, [B, N, K, V].
        taps_CW = of_heads(self.conv1d.taps_CW(), self.head_blocks()[0])
        scale, value_heads = self.sizes.key_dim**-0.5, b_TN.shape[1]
        if isinstance(segments, DecodeSegments):
            # One more token of each cached sequence, then padding, whose outputs are zeros.
            tail_BWC, state_BNKV = segments.states()
            rows = len(tail_BWC)
            qkv_BC, tail_BWC = convolve_token(qkv_TC[:rows], taps_CW, None, tail_BWC, "silu")
            q_BGK, k_BGK, v_BNV = self._heads(qkv_BC, value_heads)
            log_decay_BN = self._log_decay_TN(a_TN[:rows], of_heads)
            args = q_BGK, k_BGK, v_BNV, log_decay_BN, self._rates(b_TN[:rows]), state_BNKV
            y_BNV, state_BNKV = decode_step(*args, scale)
            segments.replace_states(tail_BWC, state_BNKV)
            return F.pad(y_BNV, (0, 0, 0, 0, 0, len(qkv_TC) - rows))
        documents = segments.uncached() if isinstance(segments, PrefillSegments) else segments
        qkv_TC, tail_BWC = causal_conv1d(qkv_TC, taps_CW, None, documents, "silu")
        q_TGK, k_TGK, v_TNV = self._heads(qkv_TC, value_heads)
        log_decay_TN = self._log_decay_TN(a_TN, of_heads)
        args = q_TGK, k_TGK, v_TNV, log_decay_TN, self._rates(b_TN), documents
        y_TNV, state_BNKV = linear_attention(*args, scale)
        if isinstance(segments, PrefillSegments):
            segments.store_states(tail_BWC, state_BNKV)
        return y_TNV

    def _rates(self, b_TN: torch.Tensor) -> torch.Tensor:
        return b_TN.sigmoid() * 2 if self.sizes.doubles_rates else b_TN.sigmoid()

    def _log_decay_TN(self, a_TN: torch.Tensor, of_heads: OfHeads) -> torch.Tensor:  # noqa: N802
        wide, blocks = torch.promote_types(a_TN.dtype, torch.float32), self.head_blocks()[2]
        bias_N, A_log_N = (of_heads(x, blocks).to(wide) for x in (self.dt_bias, self.A_log))
        # The logarithm of a rate is trained, so that decays stay between 0 and 1 (Gu and Dao 2023).
        return -A_log_N.exp() * F.softplus(a_TN.to(wide) + bias_N)

    def _heads(
        self, qkv_TC: torch.Tensor, value_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Queries and keys of length 1, [T, G, K], and values, [T, N, V].
        values = value_heads * self.sizes.value_dim
        keys = (qkv_TC.shape[-1] - values) // 2
        q_TE, k_TE, v_TE = qkv_TC.split((keys, keys, values), dim=-1)
        q_TGK, k_TGK = (x.unflatten(-1, (-1, self.sizes.key_dim)) for x in (q_TE, k_TE))
        v_TNV = v_TE.unflatten(-1, (-1, self.sizes.value_dim))
        return _unit_length(q_TGK), _unit_length(k_TGK), v_TNV


def _unit_length(x_TGK: torch.Tensor) -> torch.Tensor:
    # `x / |x|` over the last dimension, computed in fp32 and returned in x's dtype.
    wide_TGK = x_TGK.to(torch.promote_types(x_TGK.dtype, torch.float32))
    squares_TG1 = wide_TGK.square().sum(-1, keepdim=True)
    return (wide_TGK * torch.rsqrt(squares_TG1 + L2_EPS)).to(x_TGK.dtype)


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
        # Queries, keys and values before the convolution, [T, C]; the gate of the output, [T, N,
        # V]; the rate of the delta rule before its sigmoid, [T, N], and the step before dt_bias,
        # [T, N K].
        layers = self.in_proj_qkv, self.in_proj_b, self.g_a_proj, self.f_a_proj
        qkv_TC, b_TN, gate_TE, steps_TE = project(x_TD, *layers)
        z_TNV = self.g_b_proj(gate_TE).unflatten(-1, (-1, self.sizes.value_dim))
        return qkv_TC, z_TNV, b_TN, self.f_b_proj(steps_TE)

    def head_blocks(self) -> tuple[HeadBlocks, HeadBlocks, HeadBlocks]:
        # Of the channels of the convolution, and of rates and steps.
        heads = len(self.dt_bias) // self.sizes.key_dim
        channels = heads, self.sizes.key_dim
        return (channels, channels, channels), ((heads, 1),), (channels,)

    def _log_decay_TN(self, a_TN: torch.Tensor, of_heads: OfHeads) -> torch.Tensor:  # noqa: N802
        # [T, N, K], of steps [T, N K].
        wide = torch.promote_types(a_TN.dtype, torch.float32)
        _, of_rates, of_steps = self.head_blocks()
        bias_E = of_heads(self.dt_bias, of_steps).to(wide)
        # Checkpoints have it as [1, 1, N, 1].
        A_log_N = of_heads(self.A_log.flatten(), of_rates).to(wide)
        steps_TNK = F.softplus(a_TN.to(wide) + bias_E).unflatten(-1, (len(A_log_N), -1))
        return -A_log_N.exp().unsqueeze(-1) * steps_TNK
