"""Autocast for what it does not know: it casts PyTorch's own products, and none of ours."""

import torch


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """`x` in autocast's dtype where that is on, else as it is."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
