"""Masks within a document: causal, sliding window, start rows, bidirectional runs."""

import torch


def causal_window_mask(
    length: int,
    window: int | None,
    device: torch.device,
    start_rows_L: torch.Tensor | None = None,
    run_ends_L: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [L, L], queries by keys: True for later tokens, and for tokens `window` or more back.
    With run ends a query sees the keys before its own, of which it is one.

    A token is in its own window, so with a window of 1 a query attends only to itself. None: no
    window. Keys whose start row the query has reached are masked; these do not count in a
    window either. For start rows or run ends [..., L] of several documents the result is
    [..., L, L].
    """
    at_L = torch.arange(length, device=device)
    last_L = at_L if run_ends_L is None else torch.maximum(at_L, run_ends_L - 1)
    hidden_LL = last_L.unsqueeze(-1) < at_L
    if start_rows_L is not None:
        hidden_LL = hidden_LL | (at_L.unsqueeze(1) >= start_rows_L.unsqueeze(-2))
    if window is not None:
        depth_L = at_L if start_rows_L is None else visible_counts(start_rows_L)
        hidden_LL = hidden_LL | (depth_L.unsqueeze(-1) - depth_L.unsqueeze(-2) >= window)
    return hidden_LL


def visible_counts(start_rows_L: torch.Tensor) -> torch.Tensor:
    """Number of unmasked keys of each query without a window, itself included: [..., L], int64.

    Masked tokens between two tokens add no distance: a completion has the same distance from its
    prompt as if it followed it directly.
    """
    length = start_rows_L.shape[-1]
    starts_L = start_rows_L.long().clamp(max=length)
    # Start rows past the document count in one more slot, which is cut off.
    ended = starts_L.new_zeros(*starts_L.shape[:-1], length + 1)
    ended.scatter_add_(-1, starts_L, torch.ones_like(starts_L))
    seen_L = torch.arange(1, length + 1, device=starts_L.device)
    return seen_L - ended[..., :length].cumsum(-1)
