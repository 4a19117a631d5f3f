"""Multi-head latent attention (MLA) over packed sequences (varlen).

T tokens, D model width, N heads, R size of the latent vector of keys and values, P features with
RoPE, H features of queries and keys (P and those without), V of values, W the wider of H and V.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig, RotaryPairs
from penstock.models.layers.attention import AttentionFn, DecodeSegments, PrefillSegments
from penstock.models.layers.call_hook import call
from penstock.models.layers.dropout import WeightDropout
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import RMSNorm
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.reference import eager


class LatentAttention(nn.Module):
    """Queries and latent vectors, RoPE, keys and values of all heads from these, attention, output
    projection.

    Passes with a KV cache cache a token's latent vector and its key with RoPE, R + P numbers for
    all heads. A decode step computes the same in another order ("absorbed"): the projection from
    latent vectors to keys is applied to queries, and that to values to the output, so attention
    has one key head, the cached vectors, whose first R features are also the values.

    The caller that builds the model may wrap or replace the hooks `attend` and `run_core`, as in
    `SelfAttention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        attend: AttentionFn,
        operations: LayerOps = DEFAULT_LAYER_OPS,
        drop: WeightDropout | None = None,
    ) -> None:
        """With a nonzero attention dropout rate, training uses eager attention instead of
        `attend`."""
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.sizes = latent
        self.scale = config.score_scale
        self.rope_pairs: RotaryPairs = config.rope_pairs
        self.rope = operations.rope
        width, heads, bias = config.hidden_size, config.num_attention_heads, latent.bias
        if latent.q_rank is None:
            self.q_proj = nn.Linear(width, heads * latent.qk_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, latent.q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, latent.norm_eps, operations=operations)
            self.q_b_proj = nn.Linear(latent.q_rank, heads * latent.qk_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.kv_rank + latent.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, latent.norm_eps, operations=operations)
        self.kv_b_proj = nn.Linear(
            latent.kv_rank, heads * latent.head_features("kv_b_proj"), bias=False
        )
        self.o_proj = nn.Linear(heads * latent.v_dim, width, bias=bias)
        self.attend = attend
        self.run_core: Callable[..., torch.Tensor] = call
        self.dropout = drop

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TP: torch.Tensor,
        sin_TP: torch.Tensor,
        segments: VarlenMetadata,
        query_scale_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention's output, which is added to the residual stream, [T, D]. `query_scale_T` are
        factors of the queries after RoPE."""
        sizes = self.sizes
        # -1 for heads: under tensor parallelism only some are here.
        q_TNH = self._queries(x_TD).unflatten(-1, (-1, sizes.qk_dim))
        q_TNn, q_TNP = q_TNH.split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        latent_TR, k_TP = self.kv_a_proj_with_mqa(x_TD).split(
            (sizes.kv_rank, sizes.rope_dim), dim=-1
        )
        latent_TR = self.kv_a_layernorm(latent_TR)
        q_TNP, k_T1P = self.rope(q_TNP, k_TP.unsqueeze(1), cos_TP, sin_TP, self.rope_pairs)
        if query_scale_T is not None:
            scale_T11 = query_scale_T[:, None, None]
            q_TNn, q_TNP = q_TNn * scale_T11, q_TNP * scale_T11
        if isinstance(segments, PrefillSegments | DecodeSegments):
            latent_T1L = torch.cat((latent_TR.unsqueeze(1), k_T1P), dim=-1)
            if isinstance(segments, DecodeSegments):
                return self.o_proj(self._decode(q_TNn, q_TNP, latent_T1L, segments).flatten(1))
            segments.store_latents(latent_T1L)
            segments = segments.uncached()
        q_TNW = self._padded(torch.cat((q_TNn, q_TNP), dim=-1))
        y_TNW = self.run_core(self._core, q_TNW, *self._keys_values(latent_TR, k_T1P), segments)
        return self.o_proj(y_TNW[..., : sizes.v_dim].flatten(1))

    def _queries(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.sizes.q_rank is None:
            return self.q_proj(x_TD)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))

    def _keys_values(
        self, latent_TR: torch.Tensor, k_T1P: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all heads, [T, N, W] each."""
        nope, v_dim = self.sizes.nope_dim, self.sizes.v_dim
        kv_TNE = self.kv_b_proj(latent_TR).unflatten(-1, (-1, nope + v_dim))
        k_TNn, v_TNV = kv_TNE.split((nope, v_dim), dim=-1)
        k_TNH = torch.cat((k_TNn, k_T1P.expand(-1, kv_TNE.shape[1], -1)), dim=-1)
        return self._padded(k_TNH), self._padded(v_TNV)

    def _padded(self, x_TNH: torch.Tensor) -> torch.Tensor:
        """Zeros appended to a head's features: kernels take queries, keys and values of one width.
        They change neither scores nor the other features of the output."""
        missing = self.sizes.padded_dim - x_TNH.shape[-1]
        return F.pad(x_TNH, (0, missing)) if missing else x_TNH

    def _core(
        self,
        q_TNW: torch.Tensor,
        k_TNW: torch.Tensor,
        v_TNW: torch.Tensor,
        segments: VarlenMetadata,
    ) -> torch.Tensor:
        """`softmax(scale * q @ k.T) @ v` over the tokens that each token attends to, [T, N, W]."""
        if self.training and self.dropout is not None and self.dropout.is_enabled:
            args = q_TNW, k_TNW, v_TNW, segments, self.scale
            return eager(*args, drop=self.dropout.drop_probs)
        return self.attend(q_TNW, k_TNW, v_TNW, segments, self.scale)

    def _decode(
        self,
        q_TNn: torch.Tensor,
        q_TNP: torch.Tensor,
        latent_T1L: torch.Tensor,
        segments: VarlenMetadata,
    ) -> torch.Tensor:
        """Attention of new tokens to the cached vectors and their own, [T, N, V]."""
        sizes = self.sizes
        weight_ER = self._kv_b_weight(latent_T1L)
        weight_NER = weight_ER.unflatten(0, (-1, sizes.nope_dim + sizes.v_dim))
        to_keys_NnR, to_values_NVR = weight_NER.split((sizes.nope_dim, sizes.v_dim), dim=1)
        q_TNR = torch.einsum("tnh,nhr->tnr", q_TNn, to_keys_NnR)
        q_TNL = torch.cat((q_TNR, q_TNP), dim=-1)
        # Values are the keys: the cache holds them once.
        y_TNL = self.attend(q_TNL, latent_T1L, latent_T1L, segments, self.scale)
        return torch.einsum("tnr,nvr->tnv", y_TNL[..., : sizes.kv_rank], to_values_NVR)

    def _kv_b_weight(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix of kv_b_proj, [N (n + V), R], with its adapter and from any format."""
        if type(self.kv_b_proj) is nn.Linear:
            return self.kv_b_proj.weight.to(like.dtype)
        return self.kv_b_proj(torch.eye(self.sizes.kv_rank, dtype=like.dtype, device=like.device)).T
