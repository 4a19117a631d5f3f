"""The functions of FlashAttention's packages, 2 to 4, with their parameters: computed by definition
from whole masks, with autograd's own gradients. They take numbers of any width, on any device."""

import torch


def two(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert (dropout_p, alibi_slopes, return_attn_probs, block_table) == (0.0, None, False, None)
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic)
    window = [None if side < 0 else side for side in window_size]
    return attend(q, k, v, cu_seqlens_q, softmax_scale, causal, window, softcap)[0]


def three(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    assert (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa) == (None,) * 7
    assert (attention_chunk, num_splits, sm_margin, return_attn_probs) == (0, 1, 0, False)
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic)
    window = [None if side < 0 else side for side in window_size]
    return attend(q, k, v, cu_seqlens_q, softmax_scale, causal, window, softcap)[0]


def three_at_first(*arguments, **settings):
    """Its first releases: the log-sum-exp is always given."""
    return three(*arguments, **settings), torch.zeros(1)


def four(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    return_lse=False,
):
    assert (seqused_q, seqused_k, page_table, pack_gqa) == (None,) * 4
    assert (score_mod, mask_mod, block_sparse_tensors, aux_tensors) == (None,) * 4
    assert (softcap, num_splits) == (0.0, 1)
    assert all(side is None or side >= 0 for side in window_size)
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic)
    if learnable_sink is not None:
        assert learnable_sink.shape == q.shape[1:2]
        assert learnable_sink.dtype == torch.bfloat16
        # Of its own it gives them no gradient.
        learnable_sink = learnable_sink.detach()
    y, lse = attend(q, k, v, cu_seqlens_q, softmax_scale, causal, window_size, 0, learnable_sink)
    return y, lse.detach() if return_lse or q.requires_grad else None


def check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic):
    assert q.ndim == k.ndim == v.ndim == 3
    assert q.shape[1] % k.shape[1] == 0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q[-1] == len(q) == len(k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert isinstance(max_seqlen_q, int)
    assert deterministic == torch.are_deterministic_algorithms_enabled()


def attend(q, k, v, bounds, scale, causal, window, softcap, sinks=None):
    """[T, N, H] and the log-sum-exp [N, T]. A query sees what is no further than the window's sides
    to its left and right; None: all."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    at = torch.arange(len(q))
    document = torch.bucketize(at, bounds, right=True)
    back = at[:, None] - at
    left, right = window
    sees = document[:, None] == document
    sees &= back >= (0 if causal else -len(q) if right is None else -right)
    sees &= back <= (len(q) if left is None else left)
    scores = torch.einsum("qnh,knh->nqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("nqk,knh->qnh", weights, v), scores.logsumexp(-1)
