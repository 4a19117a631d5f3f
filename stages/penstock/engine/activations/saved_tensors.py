"""Saved-tensor hooks: where tensors are stored until the backward pass.

Autograd stores tensors itself, or as `saved_tensors_hooks` say. Code that stores a tensor outside
autograd, to recompute something from it, uses `save_for_backward`, so that it is stored in the same
place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Kept = Callable[[], torch.Tensor]
"""Returns the stored tensor; may be called repeatedly."""

Keeper = Callable[[torch.Tensor], Kept]
"""Stores a tensor without its graph."""

_KEPT_BY: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def saved_tensors_to(keeper: Keeper) -> Iterator[None]:
    """Context manager: autograd and `save_for_backward` store tensors with `keeper`."""
    before = _KEPT_BY.set(keeper)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keeper, unpack_hook):
            yield
    finally:
        _KEPT_BY.reset(before)


def save_for_backward(tensor: torch.Tensor) -> Kept:
    """Store a tensor without its graph."""
    if keeper := _KEPT_BY.get():
        return keeper(tensor)
    alone = tensor.detach()
    return lambda: alone


def unpack_hook(kept: Kept) -> torch.Tensor:
    """The unpack hook for autograd: return the stored tensor."""
    return kept()
