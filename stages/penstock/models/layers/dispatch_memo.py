"""What the dispatch of tokens computes from their experts' numbers, kept for recomputation.

A layer that is recomputed in the backward pass chooses the same experts again. So it needs no
second order of rows, and under expert parallelism no second exchange of counts, for whose values
the host would wait.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from penstock.models.layers.pass_state import PassState

Result = TypeVar("Result")


class _DispatchMemo:
    def __init__(self) -> None:
        self._results: list[Any] = []
        self._next = 0

    def restart(self) -> None:
        """Begin with the first result."""
        self._next = 0

    def recall(self, compute: Callable[[], Result]) -> Result:
        """The next result, computed unless an earlier run has."""
        if self._next == len(self._results):
            self._results.append(compute())
        self._next += 1
        return self._results[self._next - 1]


_MEMO = PassState[_DispatchMemo]("dispatch_memo")


def remember_dispatch(run: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `run`, which is called a second time in the backward pass: `recall` then returns what it
    did the first time."""
    memo = _DispatchMemo()

    def run_again(*args: Any) -> Result:
        memo.restart()
        with _MEMO.use(memo):
            return run(*args)

    return run_again


def recall(compute: Callable[[], Result]) -> Result:
    """What `compute` returns, or what it returned in this place of the layer's first run."""
    # A compiled graph has no context variables; it is recomputed as a whole.
    memo = None if torch.compiler.is_compiling() else _MEMO.get()
    return compute() if memo is None else memo.recall(compute)
