"""Call hooks: attributes through which a module calls its submodules. The caller that builds the
model replaces them, e.g. for activation checkpointing."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class CallHook(Protocol):
    """Calls a module, either directly or with activation checkpointing (recomputed in the backward
    pass)."""

    def __call__(self, module: Callable[..., Any], /, *args: Any) -> torch.Tensor: ...


def call(module: Callable[..., torch.Tensor], /, *args: Any) -> torch.Tensor:
    """Call the module directly. The default of every `run_…` hook."""
    return module(*args)


def no_op(x: torch.Tensor) -> torch.Tensor:
    """Return `x`. The default of hooks that map tensors."""
    return x


HeadBlocks = Sequence[tuple[int, int]]
"""Blocks of a dimension, one after another: of each the number of heads and their width."""


class OfHeads(Protocol):
    """Cuts a weight, whose first dimension has these blocks of heads, to the heads of an input."""

    def __call__(self, weight: torch.Tensor, blocks: HeadBlocks, /) -> torch.Tensor: ...


def of_all_heads(weight: torch.Tensor, blocks: HeadBlocks, /) -> torch.Tensor:
    """The weight itself: the input has all heads."""
    del blocks
    return weight
