"""Autocast for custom kernels: torch.autocast only casts PyTorch's own matmuls."""

import torch


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast `x` to the autocast dtype if autocast is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
