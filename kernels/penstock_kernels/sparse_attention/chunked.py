"""Sparse attention in chunks of queries, on any device: memory is linear in a document's length.

A chunk attends through PyTorch's scaled_dot_product_attention with the selection as its mask, so
that it computes the scores of all earlier tokens, as transformers does, and keeps none of them.

T tokens, C of a chunk of queries, M keys up to its last; N heads, H head width; J heads of the
indexer, I their width; S keys selected for a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.custom_op import fake_like, keep_inputs, operator
from penstock_kernels.sparse_attention.queries import query_chunks, query_ranges
from penstock_kernels.sparse_attention.reference import (
    NO_KEY,
    index_scores,
    selection_mask,
    top_k_of_chunk,
)

PAIRS = 1 << 22
"""Pairs of queries and keys of a chunk, at most."""


def _select(
    q_TJI: torch.Tensor,
    k_TI: torch.Tensor,
    weight_TJ: torch.Tensor,
    cu_seqlens: torch.Tensor,
    queries: Sequence[int],
    slots: int,
    top_k: int,
) -> torch.Tensor:
    selected_TS = torch.full((len(q_TJI), slots), NO_KEY, dtype=torch.int32, device=q_TJI.device)
    for chunk in query_chunks(cu_seqlens.diff().tolist(), queries, PAIRS):
        first, start, end, _ = chunk
        own = chunk.rows
        if end - first <= top_k:
            # All that is visible: no scores are needed.
            place_C1 = torch.arange(start, end, device=q_TJI.device)[:, None]
            key_S = torch.arange(first, first + slots, device=q_TJI.device)
            chosen_CS = torch.where(key_S <= place_C1, key_S, NO_KEY)
        else:
            scores_CM = index_scores(q_TJI[own], k_TI[chunk.keys], weight_TJ[own])
            chosen_CS = top_k_of_chunk(scores_CM, start - first, slots)
            chosen_CS = torch.where(chosen_CS == NO_KEY, NO_KEY, chosen_CS + first)
        selected_TS[own] = chosen_CS.to(torch.int32)
    return selected_TS


def fake_selected(q_TJI: torch.Tensor, *further: Any) -> torch.Tensor:
    """The fake implementation of both operators: the last argument but one is S."""
    return q_TJI.new_empty((len(q_TJI), further[-2]), dtype=torch.int32)


_select_operator = operator("select_keys", _select, fake=fake_selected)


def select_keys(
    q_TJI: torch.Tensor,
    k_TI: torch.Tensor,
    weight_TJ: torch.Tensor,
    segments: VarlenMetadata,
    top_k: int,
) -> torch.Tensor:
    """Same as the reference, [T, S]."""
    with torch.no_grad():
        documents = segments.cu_seqlens, query_ranges(segments)
        slots = min(top_k, segments.max_length)
        return _select_operator(q_TJI, k_TI, weight_TJ, *documents, slots, top_k)


def _attend(
    q_CNH: torch.Tensor,
    k_MNH: torch.Tensor,
    v_MNH: torch.Tensor,
    mask_CM: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (q_CNH, k_MNH, v_MNH))
    mask = mask_CM[None, None]
    # Autocast would cast the operands, which may be fp32 on purpose, to its dtype.
    with torch.autocast(q.device.type, enabled=False):
        y_1NCH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y_1NCH[0].transpose(0, 1)


def _forward(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    selected_TS: torch.Tensor,
    cu_seqlens: torch.Tensor,
    queries: Sequence[int],
    scale: float,
) -> torch.Tensor:
    # empty_like alone would keep the strides of q; an operator's result is contiguous, as its fake
    # one is.
    y_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    q, k, v = (part.to(_computed(part)) for part in (q_TNH, k_TNH, v_TNH))
    for chunk in query_chunks(cu_seqlens.diff().tolist(), queries, PAIRS):
        own, keys = chunk.rows, chunk.keys
        mask_CM = selection_mask(selected_TS[own], chunk.first, chunk.end - chunk.first)
        y_TNH[own] = _attend(q[own], k[keys], v[keys], mask_CM, scale)
    return y_TNH


def _computed(x: torch.Tensor) -> torch.dtype:
    # CPUs without matrix units for 16-bit dtypes are faster in fp32.
    return torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype


def _backward(
    dy_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    selected_TS: torch.Tensor,
    cu_seqlens: torch.Tensor,
    queries: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each chunk is computed again."""
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    dq_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    # In fp32 or wider: many chunks add to the gradients of a key.
    dk_TNH, dv_TNH = (
        torch.zeros(part.shape, dtype=wide, device=part.device) for part in (k_TNH, v_TNH)
    )
    for chunk in query_chunks(cu_seqlens.diff().tolist(), queries, PAIRS):
        own, keys = chunk.rows, chunk.keys
        mask_CM = selection_mask(selected_TS[own], chunk.first, chunk.end - chunk.first)
        # A backward pass runs in no-grad mode unless its own graph is created.
        with torch.enable_grad():
            q, k, v = (
                part.detach().to(_computed(part)).requires_grad_()
                for part in (q_TNH[own], k_TNH[keys], v_TNH[keys])
            )
            y_CNH = _attend(q, k, v, mask_CM, scale)
        dq, dk, dv = torch.autograd.grad(y_CNH, (q, k, v), dy_TNH[own].to(y_CNH.dtype))
        dq_TNH[own] = dq
        dk_TNH[keys] += dk
        dv_TNH[keys] += dv
    return dq_TNH, dk_TNH.to(k_TNH.dtype), dv_TNH.to(v_TNH.dtype)


_operator_backward = operator("sparse_attention_backward", _backward, fake=fake_like(1, 2, 3))


def _gradients(ctx: Any, dy_TNH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv = _operator_backward(dy_TNH, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None, None, None, None


_operator = operator(
    "sparse_attention", _forward, fake=fake_like(0), keep=keep_inputs(5), backward=_gradients
)


def sparse_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    selected_TS: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
) -> torch.Tensor:
    """Same as the reference, [T, N, H]."""
    documents = segments.cu_seqlens, query_ranges(segments)
    return _operator(q_TNH, k_TNH, v_TNH, selected_TS, *documents, scale)
