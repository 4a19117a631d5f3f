"""Looks up modules by number from within compiled code.

One compiled graph serves all layers of a kind, so it must not contain anything specific to a layer
or a step, such as a layer's name, the RNG of dropout or the router observer. A custom operator gets
the module's number as a tensor and looks the module up at run time.
"""

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import nn


class OpModule(nn.Module):
    """A module that custom operators can look up at run time."""

    op_id: torch.Tensor | None
    """int64 [], on the CPU; None before `register_op`."""

    def __init__(self) -> None:
        super().__init__()
        self.op_id = None

    def register_op(self) -> None:
        """Register the module. The registry holds a weak reference."""
        number = next(_NEXT_ID)
        _MODULES[number] = self
        # On the CPU whatever the default device is: reading it must not wait for a GPU.
        self.op_id = torch.tensor(number, device="cpu")

    def traced_op_id(self) -> torch.Tensor | None:
        """The number while torch.compile traces, otherwise None: eager code accesses the module
        directly."""
        return self.op_id if torch.compiler.is_compiling() else None


def module_by_id(number: torch.Tensor) -> OpModule:
    """The module with this number."""
    return _MODULES[int(number)]


_NEXT_ID = count()
# Otherwise every model that this process ever compiled would stay in memory.
_MODULES: WeakValueDictionary[int, OpModule] = WeakValueDictionary()
