"""Grouped-query attention (GQA) over packed sequences (varlen).

T tokens, D model width, N query heads, K key and value heads, H head dimension.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig, RotaryPairs
from penstock.models.layers.call_hook import call
from penstock.models.layers.dropout import WeightDropout
from penstock.models.layers.joint_linear import project
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import build_qk_norm, unit_rms_norm
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.reference import eager

QKV = ("q_proj", "k_proj", "v_proj")


class AttentionFn(Protocol):
    """Causal attention within each document: q [T,N,H], k and v [T,K,H] in, [T,N,H] out.

    A token attends to the last `window` tokens including itself; None: to all earlier ones.
    `k_TKH` and `v_TKH` may be one tensor. `sinks_N` are attention sink logits (one per head,
    without a value), or None. Scores are soft-capped at `soft_cap`; None: not.
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
        soft_cap: float | None = None,
        /,
    ) -> torch.Tensor: ...


class PrefillSegments(VarlenMetadata, ABC):
    """Documents of a prefill, whose layers fill the KV cache."""

    @abstractmethod
    def store(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Cache the keys and values of the current layer. They may be one tensor, which is then
        cached once."""

    @abstractmethod
    def store_latents(self, x_S1H: torch.Tensor) -> None:
        """Cache what the heads of the current layer share, of this rank's tokens."""

    @abstractmethod
    def store_states(self, *states: torch.Tensor) -> None:
        """Cache the states of the current layer: of each document, [B, ...]."""

    @abstractmethod
    def uncached(self) -> VarlenMetadata:
        """The same documents for attention without the cache."""


class DecodeSegments(VarlenMetadata, ABC):
    """Sequences of a decode step, of one new token each."""

    @abstractmethod
    def append_latents(self, x_T1H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cache what the heads of the current layer share, of the new tokens; what is cached of
        each sequence, [B, C, H], and which of it is its own, bool [B, C] (None: all)."""

    @abstractmethod
    def states(self) -> tuple[torch.Tensor, ...]:
        """The states of the current layer, of each sequence, [B, ...]."""

    @abstractmethod
    def replace_states(self, *states: torch.Tensor) -> None:
        """Cache the states after the new tokens, in place of those that `states` returned."""


def in_bf16(attend: AttentionFn) -> AttentionFn:
    """Cast queries, keys and values to bf16 for attention, and the result back."""

    def attend_in_bf16(
        q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, /, *args: Any
    ) -> torch.Tensor:
        q, k, v = (part.bfloat16() for part in (q_TNH, k_TKH, v_TKH))
        return attend(q, k, v, *args).to(q_TNH.dtype)

    return attend_in_bf16


class SelfAttention(nn.Module):
    """Q, K and V projections, QK norm if the family has it, RoPE, attention, output projection.

    The caller that builds the model may wrap or replace the hooks `attend` and `run_core`.
    `run_core` calls attention without projections, norms and RoPE.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        merge_qkv: bool,
        attend: AttentionFn,
        operations: LayerOps = DEFAULT_LAYER_OPS,
        drop: WeightDropout | None = None,
    ) -> None:
        """With a nonzero attention dropout rate, training uses eager attention instead of
        `attend`."""
        super().__init__()
        config = config.of_layer(layer)
        self.window = config.layer_window(layer)
        self.sinks = (
            nn.Parameter(torch.empty(config.num_attention_heads))
            if config.attention_sinks
            else None
        )
        self.head_dim = config.head_dim
        self.scale, self.soft_cap = config.score_scale, config.attention_soft_cap
        self.merge_qkv = merge_qkv or config.fused_qkv
        self.rope_pairs: RotaryPairs = config.rope_pairs
        self.output_gate = config.output_gate
        self.qkv_sizes = list(config.qkv_features.values())
        width, bias = config.hidden_size, config.qkv_bias
        if self.merge_qkv:
            self.qkv_proj = nn.Linear(width, sum(self.qkv_sizes), bias=bias)
        else:
            for part, features in config.qkv_features.items():
                self.add_module(part, nn.Linear(width, features, bias=bias))
        outputs = config.num_attention_heads * config.head_dim
        self.o_proj = nn.Linear(outputs, width, bias=config.o_bias)
        self.qk_norm, self.qk_norm_over = config.qk_norm, config.qk_norm_over
        self.qk_norm_after_rope = config.qk_norm_after_rope
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                build_qk_norm(config, heads, operations)
                for heads in (config.num_attention_heads, config.num_key_value_heads)
            )
        self.value_norm_eps = config.rms_norm_eps if config.value_norm else None
        self.attend = attend
        self.run_core: Callable[..., torch.Tensor] = call
        self.dropout = drop
        self.rope = operations.rope
        self.use_rope = config.learned_positions is None and layer not in config.no_rope_layers
        has_unit_norm = config.qk_unit_norm and self.use_rope
        self.unit_norm_eps = config.rms_norm_eps if has_unit_norm else None

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TH: torch.Tensor,
        sin_TH: torch.Tensor,
        segments: VarlenMetadata,
        query_scale_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention's output, which is added to the residual stream, [T, D]. `query_scale_T` are
        factors of the queries after RoPE."""
        if self.merge_qkv:
            q, k, *values = self.qkv_proj(x_TD).split(self.qkv_sizes, dim=-1)
        else:
            parts = (getattr(self, part) for part in QKV[: len(self.qkv_sizes)])
            q, k, *values = project(x_TD, *parts)
        # Keys that are values are so before norm and RoPE.
        v = values[0] if values else k
        gate_TNH = None
        if self.output_gate:
            # In q_proj the rows of a head's gate follow those of its query.
            q, gate_TNH = q.view(len(q), -1, 2 * self.head_dim).chunk(2, dim=-1)
        if self.qk_norm and self.qk_norm_over == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        # -1 for heads, because under tensor parallelism the projections return only the local
        # heads.
        q_TNH, k_TKH, v_TKH = (
            part if part.ndim == 3 else part.view(len(part), -1, self.head_dim)
            for part in (q, k, v)
        )
        norms_heads = self.qk_norm and self.qk_norm_over == "head"
        if norms_heads and not self.qk_norm_after_rope:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        if self.use_rope:
            q_TNH, k_TKH = self.rope(q_TNH, k_TKH, cos_TH, sin_TH, self.rope_pairs)
        if norms_heads and self.qk_norm_after_rope:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        if self.unit_norm_eps is not None:
            q_TNH, k_TKH = (unit_rms_norm(heads, self.unit_norm_eps) for heads in (q_TNH, k_TKH))
        if self.value_norm_eps is not None:
            v_TKH = unit_rms_norm(v_TKH, self.value_norm_eps)
        if query_scale_T is not None:
            q_TNH = q_TNH * query_scale_T[:, None, None]
        y_TNH = self.run_core(self._core, q_TNH, k_TKH, v_TKH, segments)
        if gate_TNH is not None:
            y_TNH = y_TNH * gate_TNH.sigmoid()
        return self.o_proj(y_TNH.flatten(1))

    def _core(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: VarlenMetadata,
    ) -> torch.Tensor:
        # `softmax(scale * q @ k.T) @ v` over the tokens that each token attends to, [T, N, H].
        settings = self.scale, self.window, self.sinks, self.soft_cap
        args = (q_TNH, k_TKH, v_TKH, segments, *settings)
        # Only eager attention has the probabilities, of which some are dropped.
        if self.training and self.dropout is not None and self.dropout.is_enabled:
            return eager(*args, drop=self.dropout.drop_probs)
        return self.attend(*args)
