"""Packed attention by its definition: every pair of tokens of the row, in fp64, under one mask."""

import torch


def visible(lengths):
    """bool [T, T]: whether a query (row) sees a key (column): its own document's, and not later."""
    document = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    same = document.unsqueeze(1) == document.unsqueeze(0)
    return same & torch.ones(len(document), len(document), dtype=torch.bool).tril()


def dense_attention(q, k, v, lengths, scale):
    """[T, N, H] of q [T, N, H] and k, v [T, K, H]."""
    q, k, v = (part.double() for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * scale
    weights = scores.masked_fill(~visible(lengths), float("-inf")).softmax(-1)
    return torch.einsum("nqk,knh->qnh", weights, v)


def dense_with_gradients(q, k, v, dy, lengths, scale):
    """y, dq, dk, dv."""
    q, k, v = (part.detach().clone().requires_grad_() for part in (q, k, v))
    y = dense_attention(q, k, v, lengths, scale)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy.double())]


def relative_error(got, want):
    """The norm of the difference, relative to the norm of what is wanted."""
    return ((got.double() - want).norm() / want.norm()).item()
