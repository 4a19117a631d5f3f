"""Modules that compiled programs find by number.

One program serves all layers of a kind, and so knows tensors alone: a layer's name would be
compiled in, and what is drawn from, or who looks on, is another one at every step. An operator that
is given a module's number, a tensor, asks the module when the program runs.
"""

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import nn


class OpModule(nn.Module):
    """A module that may be asked from within a compiled program."""

    number: torch.Tensor | None
    """int64 [], on the host; None before `give_number`."""

    def __init__(self) -> None:
        super().__init__()
        self.number = None

    def give_number(self) -> None:
        """Be known to operators, for as long as the module lives."""
        number = next(_NUMBERS)
        _KNOWN[number] = self
        self.number = torch.tensor(number, device="cpu")

    def known_number(self) -> torch.Tensor | None:
        """Its number while a program is compiled, and None otherwise: then it is asked directly."""
        return self.number if torch.compiler.is_compiling() else None


def numbered(number: torch.Tensor) -> OpModule:
    """The module of this number."""
    return _KNOWN[int(number)]


_NUMBERS = count()
_KNOWN: WeakValueDictionary[int, OpModule] = WeakValueDictionary()
