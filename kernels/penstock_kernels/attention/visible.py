"""Which keys of its own document a query does not see."""

import torch


def hidden_keys(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [L, L], queries by keys: what comes later, and what lies `window` tokens back or more.

    A token is in its own window, so a window of 1 shows a query nothing but itself. None: a query
    sees all of its past.
    """
    at_L = torch.arange(length, device=device)
    back_LL = at_L.unsqueeze(1) - at_L
    hidden_LL = back_LL < 0
    return hidden_LL if window is None else hidden_LL | (back_LL >= window)
