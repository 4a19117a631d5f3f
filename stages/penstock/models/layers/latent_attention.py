"""Multi-head latent attention (MLA) over packed sequences (varlen).

T tokens, D model width, N heads, R size of the latent vector of keys and values, P features with
RoPE, H features of queries and keys (P and those without), V of values, W the wider of H and V;
with an indexer I features of its key, and S the tokens that it selects.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig, RotaryPairs
from penstock.models.layers.attention import AttentionFn, DecodeSegments, PrefillSegments
from penstock.models.layers.call_hook import call
from penstock.models.layers.dropout import Dropout, WeightDropout
from penstock.models.layers.indexer import Index, Indexer, IndexerLoss
from penstock.models.layers.joint_linear import project
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import RMSNorm
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.decode import decode_attention
from penstock_kernels.attention.reference import eager
from penstock_kernels.sparse_attention import latent_sparse_attention, sparse_attention

Features = tuple[torch.Tensor, ...]
"""Parts of the features of a head's queries or keys."""


class LatentAttention(nn.Module):
    """Queries and latent vectors, RoPE, keys and values of all heads from these, attention, output
    projection.

    Passes with a KV cache cache a token's latent vector and its key with RoPE, R + P numbers for
    all heads. A decode step computes the same in another order ("absorbed"): the projection from
    latent vectors to keys is applied to queries, and that to values to the output, so attention
    has one key head, the cached vectors, whose first R features are also the values.

    With an indexer (DeepSeek Sparse Attention) a token attends to those that it selects, absorbed
    where the latent vectors can be gathered. Documents of which it would select all are computed
    without.

    The caller that builds the model may wrap or replace the hooks `attend` and `run_core`, as in
    `SelfAttention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
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
        self.rope = None if layer in config.no_rope_layers else operations.rope
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
        self.indexer = Indexer(config, operations=operations) if latent.indexer else None
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
        q_latent_TQ = None
        if sizes.q_rank is None:
            q_TE, kv_TE = project(x_TD, self.q_proj, self.kv_a_proj_with_mqa)
        else:
            q_latent_TQ, kv_TE = project(x_TD, self.q_a_proj, self.kv_a_proj_with_mqa)
            q_latent_TQ = self.q_a_layernorm(q_latent_TQ)
            q_TE = self.q_b_proj(q_latent_TQ)
        q_TNH = q_TE.unflatten(-1, (-1, sizes.qk_dim))
        q_TNn, q_TNP = q_TNH.split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        latent_TR, k_TP = kv_TE.split((sizes.kv_rank, sizes.rope_dim), dim=-1)
        latent_TR = self.kv_a_layernorm(latent_TR)
        k_T1P = k_TP.unsqueeze(1)
        if self.rope is not None:
            q_TNP, k_T1P = self.rope(q_TNP, k_T1P, cos_TP, sin_TP, self.rope_pairs)
        if query_scale_T is not None:
            scale_T11 = query_scale_T[:, None, None]
            q_TNn, q_TNP = q_TNn * scale_T11, q_TNP * scale_T11
        is_cached = isinstance(segments, PrefillSegments | DecodeSegments)
        index = loss = None
        if self.indexer is not None:
            loss = self.indexer.current_loss(segments)
            if is_cached or loss or self.indexer.selects(segments):
                index = self.indexer(x_TD, q_latent_TQ, cos_TP, sin_TP)
        if isinstance(segments, PrefillSegments | DecodeSegments):
            index_key = () if index is None else (index[1].unsqueeze(1),)
            cached_T1L = torch.cat((latent_TR.unsqueeze(1), k_T1P, *index_key), dim=-1)
            if isinstance(segments, DecodeSegments):
                y_TNV = self._decode(q_TNn, q_TNP, cached_T1L, segments, index)
                return self.o_proj(y_TNV.flatten(1))
            segments.store_latents(cached_T1L)
            segments = segments.uncached()
        inputs = q_TNn, q_TNP, latent_TR, k_T1P, segments
        if self.indexer is not None and index is not None:
            y_TNV = self._attend_indexed(*inputs, self.indexer, index, loss)
        else:
            y_TNV, *_ = self._attend(*inputs, None)
        return self.o_proj(y_TNV.flatten(1))

    def _attend_indexed(
        self,
        q_TNn: torch.Tensor,
        q_TNP: torch.Tensor,
        latent_TR: torch.Tensor,
        k_T1P: torch.Tensor,
        segments: VarlenMetadata,
        indexer: Indexer,
        index: Index,
        loss: IndexerLoss | None,
    ) -> torch.Tensor:
        # What the tokens attend to, with the gradient of the indexer's loss, [T, N, V]. Under
        # context parallelism keys are those of all ranks' tokens.
        key_segments, selected_TS = indexer.keys.segments(segments), None
        index_key, latents, rotated = indexer.keys.gather(index[1], latent_TR, k_T1P)
        index, keys = (index[0], index_key, index[2]), (latents, rotated)
        inputs = q_TNn, q_TNP, *keys, key_segments
        if indexer.selects(segments):
            selected_TS = indexer.select(index, key_segments)
        if selected_TS is None:
            y_TNV, q_TNF, k_TNF = self._attend(q_TNn, q_TNP, latent_TR, k_T1P, segments, None)
            if loss is not None and key_segments is not segments:
                with torch.no_grad():
                    k_TNF = (self._keys_values(*keys)[0],)
        else:
            # Latent vectors are gathered where `kv_b_proj` is a matrix: it is none where its
            # adapter drops inputs.
            parts = self.kv_b_proj.modules()
            drops = any(isinstance(part, Dropout) and part.is_enabled for part in parts)
            absorbed = q_TNn, q_TNP, latents, rotated.squeeze(1), selected_TS, key_segments
            attend = self._attend
            if not (self.training and drops) and latent_sparse_attention.is_fast(
                *absorbed, self.scale
            ):
                attend = self._attend_latents
            y_TNV, q_TNF, k_TNF = attend(*inputs, selected_TS)
        if loss is None:
            return y_TNV
        compared = torch.cat(q_TNF, dim=-1), torch.cat(k_TNF, dim=-1)
        args = index, *compared, selected_TS, key_segments, self.scale
        return indexer.add_loss(loss, y_TNV, *args)

    def _attend(
        self,
        q_TNn: torch.Tensor,
        q_TNP: torch.Tensor,
        latent_TR: torch.Tensor,
        k_T1P: torch.Tensor,
        segments: VarlenMetadata,
        selected_TS: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Features, Features]:
        """What the tokens attend to, [T, N, V], and the queries and keys that are compared."""
        q_TNW = self._padded(torch.cat((q_TNn, q_TNP), dim=-1))
        k_TNW, v_TNW = self._keys_values(latent_TR, k_T1P)
        selected = () if selected_TS is None else (selected_TS,)
        y_TNW = self.run_core(self._core, q_TNW, k_TNW, v_TNW, segments, *selected)
        return y_TNW[..., : self.sizes.v_dim], (q_TNW,), (k_TNW,)

    def _attend_latents(
        self,
        q_TNn: torch.Tensor,
        q_TNP: torch.Tensor,
        latent_TR: torch.Tensor,
        k_T1P: torch.Tensor,
        segments: VarlenMetadata,
        selected_TS: torch.Tensor,
    ) -> tuple[torch.Tensor, Features, Features]:
        # The same as `_attend`, absorbed: all heads have the latent vectors as their keys.
        to_keys_NnR, to_values_NVR = self._absorbed_weights(latent_TR)
        q_TNR = torch.einsum("tnh,nhr->tnr", q_TNn, to_keys_NnR)
        inputs = q_TNR, q_TNP, latent_TR, k_T1P.squeeze(1), selected_TS, segments
        y_TNR = self.run_core(latent_sparse_attention, *inputs, self.scale)
        y_TNV = torch.einsum("tnr,nvr->tnv", y_TNR, to_values_NVR)
        return y_TNV, (q_TNR, q_TNP), (latent_TR.unsqueeze(1), k_T1P)

    def _keys_values(
        self, latent_TR: torch.Tensor, k_T1P: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nope, v_dim = self.sizes.nope_dim, self.sizes.v_dim
        kv_TNE = self.kv_b_proj(latent_TR).unflatten(-1, (-1, nope + v_dim))
        k_TNn, v_TNV = kv_TNE.split((nope, v_dim), dim=-1)
        k_TNH = torch.cat((k_TNn, k_T1P.expand(-1, kv_TNE.shape[1], -1)), dim=-1)
        return self._padded(k_TNH), self._padded(v_TNV)

    def _padded(self, x_TNH: torch.Tensor) -> torch.Tensor:
        # Zeros appended to a head's features: kernels take queries, keys and values of one width.
        # They change neither scores nor the other features of the output.
        missing = self.sizes.padded_dim - x_TNH.shape[-1]
        return F.pad(x_TNH, (0, missing)) if missing else x_TNH

    def _core(
        self,
        q_TNW: torch.Tensor,
        k_TNW: torch.Tensor,
        v_TNW: torch.Tensor,
        segments: VarlenMetadata,
        selected_TS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # `softmax(scale * q @ k.T) @ v` over the tokens that each token attends to, [T, N, W]:
        # those selected, or all earlier ones.
        if selected_TS is not None:
            return sparse_attention(q_TNW, k_TNW, v_TNW, selected_TS, segments, self.scale)
        if self.training and self.dropout is not None and self.dropout.is_enabled:
            args = q_TNW, k_TNW, v_TNW, segments, self.scale
            return eager(*args, drop=self.dropout.drop_probs)
        return self.attend(q_TNW, k_TNW, v_TNW, segments, self.scale)

    def _decode(
        self,
        q_TNn: torch.Tensor,
        q_TNP: torch.Tensor,
        cached_T1L: torch.Tensor,
        segments: DecodeSegments,
        index: Index | None,
    ) -> torch.Tensor:
        """Attention of new tokens to the cached vectors and their own, [T, N, V]."""
        sizes = self.sizes
        to_keys_NnR, to_values_NVR = self._absorbed_weights(cached_T1L)
        q_TNR = torch.einsum("tnh,nhr->tnr", q_TNn, to_keys_NnR)
        q_TNL = torch.cat((q_TNR, q_TNP), dim=-1)
        if self.indexer is None or index is None:
            # Values are the keys: the cache holds them once.
            y_TNL = self.attend(q_TNL, cached_T1L, cached_T1L, segments, self.scale)
        else:
            # The cached vectors that the indexer selects; zeros for padding.
            cached_BCL, visible_BC = segments.append_latents(cached_T1L)
            rows, widths = len(cached_BCL), (q_TNL.shape[-1], self.indexer.sizes.head_dim)
            keys_BCL, k_BCI = cached_BCL.split(widths, dim=-1)
            q_TJI, _, weight_TJ = index
            mask_BC = self.indexer.cached_mask(q_TJI[:rows], k_BCI, weight_TJ[:rows], visible_BC)
            keys_B1CL = keys_BCL.unsqueeze(1)
            q_BNL = q_TNL[:rows].to(keys_B1CL.dtype)
            y_BNL = decode_attention(q_BNL, keys_B1CL, keys_B1CL, mask_BC, self.scale)
            y_TNL = F.pad(y_BNL, (0, 0, 0, 0, 0, len(q_TNL) - rows))
        return torch.einsum("tnr,nvr->tnv", y_TNL[..., : sizes.kv_rank], to_values_NVR)

    def _absorbed_weights(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The matrices of `kv_b_proj` from latent vectors to keys and to values of each head, with
        # its adapter and from any format.
        sizes = self.sizes
        if type(self.kv_b_proj) is nn.Linear:
            weight_ER = self.kv_b_proj.weight.to(like.dtype)
        else:
            # Not one matrix, but linear: its outputs for the unit vectors are the columns of one.
            weight_ER = self.kv_b_proj(
                torch.eye(sizes.kv_rank, dtype=like.dtype, device=like.device)
            ).T
        weight_NER = weight_ER.unflatten(0, (-1, sizes.nope_dim + sizes.v_dim))
        to_keys_NnR, to_values_NVR = weight_NER.split((sizes.nope_dim, sizes.v_dim), dim=1)
        return to_keys_NnR, to_values_NVR
