"""What a backward pass will want, and where it is kept until then.

Autograd keeps tensors itself, or as `saved_tensors_hooks` say. Who keeps a tensor beside autograd,
to compute something again from it, does so with `save_for_backward`, and so where autograd's would
be kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Kept = Callable[[], torch.Tensor]
"""Gives back what was kept, as often as it is asked."""

Keeper = Callable[[torch.Tensor], Kept]
"""Keeps a tensor, and nothing of its graph."""

_KEPT_BY: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def saved_tensors_to(keeper: Keeper) -> Iterator[None]:
    """While this is entered, autograd and `save_for_backward` leave what they keep with
    `keeper`."""
    before = _KEPT_BY.set(keeper)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keeper, unpack_hook):
            yield
    finally:
        _KEPT_BY.reset(before)


def save_for_backward(tensor: torch.Tensor) -> Kept:
    """Keep a tensor, without the graph that it came of."""
    if keeper := _KEPT_BY.get():
        return keeper(tensor)
    alone = tensor.detach()
    return lambda: alone


def unpack_hook(kept: Kept) -> torch.Tensor:
    """What autograd wants of what it was left with instead of a tensor."""
    return kept()
