"""Grouped-query attention over a flat micro-batch of documents.

T tokens, D model width, N query heads, K key and value heads, H head width.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig, RotaryPairs
from penstock.models.layers.call_hook import call
from penstock.models.layers.dropout import WeightDropout
from penstock.models.layers.layer_ops import BEST_OPERATIONS, LayerOps
from penstock.models.layers.norm import RMSNorm
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.reference import eager


class AttentionFn(Protocol):
    """Causal attention within each document: q [T,N,H], k and v [T,K,H] in, [T,N,H] out.

    A token sees the last `window` ones up to itself, or with None all of them. `sinks_N`, if there
    are any, are scores beside those of the keys, to which no value belongs.
    """

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: VarlenMetadata,
        scale: float,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor: ...


def in_bf16(attend: AttentionFn) -> AttentionFn:
    """Attention of queries, keys and values in bf16, whatever they came in; given back in that."""

    def attend_in_bf16(
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: VarlenMetadata,
        scale: float,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        q, k, v = (part.bfloat16() for part in (q_TNH, k_TKH, v_TKH))
        return attend(q, k, v, segments, scale, window, sinks_N).to(q_TNH.dtype)

    return attend_in_bf16


class SelfAttention(nn.Module):
    """Project, normalise if the family does, rotate, attend, project back.

    `attend` is a socket: whoever assembles the model may wrap or replace it. So is `run_core`,
    through which attention is called without its projections, norms and rotary embedding.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        merge_qkv: bool,
        attend: AttentionFn,
        operations: LayerOps = BEST_OPERATIONS,
        drop: WeightDropout | None = None,
    ) -> None:
        """Where `drop` drops anything, plain attention is computed instead of what is plugged."""
        super().__init__()
        self.window = config.layer_window(layer)
        self.sinks = (
            nn.Parameter(torch.empty(config.num_attention_heads))
            if config.attention_sinks
            else None
        )
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.merge_qkv = merge_qkv
        self.rope_pairs: RotaryPairs = config.rope_pairs
        self.parts = list(config.qkv_parts.values())
        width, bias = config.hidden_size, config.qkv_bias
        if merge_qkv:
            self.qkv_proj = nn.Linear(width, sum(self.parts), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(width, features, bias=bias) for features in self.parts
            )
        self.o_proj = nn.Linear(self.parts[0], width, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, config.rms_norm_eps, operations=operations)
                for _ in range(2)
            )
        self.attend = attend
        self.run_core: Callable[..., torch.Tensor] = call
        self.drop = drop
        self.rope = operations.rope
        self.turns = config.learned_positions is None

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TH: torch.Tensor,
        sin_TH: torch.Tensor,
        segments: VarlenMetadata,
    ) -> torch.Tensor:
        """Attention's contribution to the residual stream, [T, D]."""
        q, k, v = self._projected(x_TD)
        # -1 heads: a projection that holds only some of the heads gives as many as it holds.
        q_TNH, k_TKH, v_TKH = (part.view(len(part), -1, self.head_dim) for part in (q, k, v))
        if self.qk_norm:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        if self.turns:
            q_TNH, k_TKH = self.rope(q_TNH, k_TKH, cos_TH, sin_TH, self.rope_pairs)
        y_TNH = self.run_core(self._core, q_TNH, k_TKH, v_TKH, segments)
        return self.o_proj(y_TNH.flatten(1))

    def _core(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: VarlenMetadata,
    ) -> torch.Tensor:
        """`softmax(scale * q @ k.T) @ v` of the tokens that each one sees, [T, N, H]."""
        given = (q_TNH, k_TKH, v_TKH, segments, self.scale, self.window, self.sinks)
        if self.training and self.drop is not None and self.drop.drops:
            return eager(*given, drop=self.drop.left_of)
        return self.attend(*given)

    def _projected(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.merge_qkv:
            return self.qkv_proj(x_TD).split(self.parts, dim=-1)
        return self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)
