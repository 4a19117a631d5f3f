"""Packed attention by its definition: every pair of tokens of the row, in fp64, under one mask."""

import torch


def visible(lengths, window=None, start_rows=None, bidirectional=()):
    """bool [T, T]: whether a query (row) sees a key (column): its own document's, not later, before
    the row from which on the key is hidden, and among the last `window` that are left: of those two
    tokens see, that one sees so many fewer than this one; and all later ones of its bidirectional
    run."""
    document = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    same = document.unsqueeze(1) == document.unsqueeze(0)
    sees = same & torch.ones(len(document), len(document), dtype=torch.bool).tril()
    if start_rows is not None:
        sees &= torch.arange(len(document)).unsqueeze(1) < torch.tensor(start_rows)
    if window is not None:
        depth = sees.sum(1)
        sees &= depth.unsqueeze(1) - depth < window
    for first, end in bidirectional:
        sees[first:end, first:end] |= torch.ones(end - first, end - first, dtype=torch.bool).triu()
    return sees


def dense_attention(q, k, v, lengths, scale, window=None, sinks=None, *, soft_cap=None, **masks):
    """[T, N, H] of q [T, N, H], k, v [T, K, H] and sinks [N]."""
    q, k, v = (part.double() for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    shares = scores.masked_fill(~visible(lengths, window, **masks), float("-inf")).exp()
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("nqk,knh->qnh", shares / total, v)


def dense_with_gradients(q, k, v, dy, lengths, scale, window=None, sinks=None, **more):
    """y, dq, dk, dv, and dsinks if there are sinks."""
    given = [q, k, v] if sinks is None else [q, k, v, sinks]
    given = [part.detach().clone().requires_grad_() for part in given]
    y = dense_attention(*given[:3], lengths, scale, window, *given[3:], **more)
    return [y.detach(), *torch.autograd.grad(y, given, dy.double())]


def relative_error(got, want):
    """The norm of the difference, relative to the norm of what is wanted."""
    return ((got.double() - want).norm() / want.norm()).item()
