"""Which keys of its own document a query does not see."""

import torch


def hidden_keys(
    length: int,
    window: int | None,
    device: torch.device,
    start_rows_L: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [L, L], queries by keys: what comes later, and what lies `window` tokens back or more.

    A token is in its own window, so a window of 1 shows a query nothing but itself. None: a query
    sees all of its past, but for the keys whose start row it has reached. For start rows
    [..., L] of several documents the result is [..., L, L].
    """
    at_L = torch.arange(length, device=device)
    back_LL = at_L.unsqueeze(1) - at_L
    hidden_LL = back_LL < 0
    if window is not None:
        hidden_LL = hidden_LL | (back_LL >= window)
    if start_rows_L is not None:
        hidden_LL = hidden_LL | (at_L.unsqueeze(1) >= start_rows_L.unsqueeze(-2))
    return hidden_LL
