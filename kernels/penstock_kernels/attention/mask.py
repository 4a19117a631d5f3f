"""Which keys of its own document a query does not see."""

import torch


def causal_window_mask(
    length: int,
    window: int | None,
    device: torch.device,
    start_rows_L: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [L, L], queries by keys: what comes later, and what lies window tokens back or more.

    A token is in its own window, so a window of 1 shows a query nothing but itself. None: a query
    sees all of its past, but for the keys whose start row it has reached; these do not count in a
    window either. For start rows [..., L] of several documents the result is [..., L, L].
    """
    at_L = torch.arange(length, device=device)
    hidden_LL = at_L.unsqueeze(1) < at_L
    if start_rows_L is not None:
        hidden_LL = hidden_LL | (at_L.unsqueeze(1) >= start_rows_L.unsqueeze(-2))
    if window is not None:
        depth_L = at_L if start_rows_L is None else visible_counts(start_rows_L)
        hidden_LL = hidden_LL | (depth_L.unsqueeze(-1) - depth_L.unsqueeze(-2) >= window)
    return hidden_LL


def visible_counts(start_rows_L: torch.Tensor) -> torch.Tensor:
    """How many tokens each one sees without a window, itself too: [..., L], int64.

    What lies between two tokens and is hidden from the second one parts them by nothing: an answer
    is as far from its prompt as if it followed it.
    """
    length = start_rows_L.shape[-1]
    starts_L = start_rows_L.long().clamp(max=length)
    ended = starts_L.new_zeros(*starts_L.shape[:-1], length + 1)
    ended.scatter_add_(-1, starts_L, torch.ones_like(starts_L))
    seen_L = torch.arange(1, length + 1, device=starts_L.device)
    return seen_L - ended[..., :length].cumsum(-1)
