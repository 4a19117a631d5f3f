"""Which host tensors are pinned. A copy from or to pageable memory waits for the device."""

import weakref

import torch

_pinned: set[int] = set()
"""Storages of pinned tensors."""


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Take a host tensor, and all that share its storage, for pinned; returns it."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _pinned:
        _pinned.add(storage._cdata)
        weakref.finalize(storage, _pinned.discard, storage._cdata)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor is pinned."""
    return tensor.untyped_storage()._cdata in _pinned


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy, or the tensor itself if it is pinned."""
    return tensor if is_pinned(tensor) else mark_pinned(tensor.clone())
