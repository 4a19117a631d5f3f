"""Saved-tensor hooks: where tensors are stored until the backward pass.

Autograd stores tensors itself, or as `saved_tensors_hooks` say. Code that stores a tensor outside
autograd, to recompute something from it, uses `save_for_backward`, so that it is stored in the same
place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

SavedTensor = Callable[[], torch.Tensor]
"""Returns the stored tensor; may be called repeatedly."""

SaveFn = Callable[[torch.Tensor], SavedTensor]
"""Stores a tensor without its graph."""

_SAVE_FN: ContextVar[SaveFn | None] = ContextVar("keeper", default=None)


@contextmanager
def saved_tensors_to(keeper: SaveFn) -> Iterator[None]:
    """Context manager: autograd and `save_for_backward` store tensors with `keeper`."""
    before = _SAVE_FN.set(keeper)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keeper, unpack_hook):
            yield
    finally:
        _SAVE_FN.reset(before)


def save_for_backward(tensor: torch.Tensor) -> SavedTensor:
    """Store a tensor without its graph."""
    if keeper := _SAVE_FN.get():
        return keeper(tensor)
    alone = tensor.detach()
    return lambda: alone


def unpack_hook(saved: SavedTensor) -> torch.Tensor:
    """The unpack hook for autograd: return the stored tensor."""
    return saved()
