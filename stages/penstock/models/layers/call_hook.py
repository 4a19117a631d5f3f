"""The way a module's parts are called: the sockets that whoever assembles a model plugs into."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn


class CallHook(Protocol):
    """A way to call a module: at once, or such that it is computed again in the backward pass."""

    def __call__(self, module: nn.Module, /, *args: Any) -> torch.Tensor: ...


def call(module: Callable[..., torch.Tensor], /, *args: Any) -> torch.Tensor:
    """Call it. The default of every `run_…` socket."""
    return module(*args)
