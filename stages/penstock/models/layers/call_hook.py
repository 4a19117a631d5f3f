"""Call hooks: attributes through which a module calls its submodules. The caller that builds the
model replaces them, e.g. for activation checkpointing."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class CallHook(Protocol):
    """Calls a module, either directly or with activation checkpointing (recomputed in the backward
    pass)."""

    def __call__(self, module: Callable[..., Any], /, *args: Any) -> torch.Tensor: ...


def call(module: Callable[..., torch.Tensor], /, *args: Any) -> torch.Tensor:
    """Call the module directly. The default of every `run_…` hook."""
    return module(*args)
