"""State of the forward pass of one micro-batch: the RNG of dropout, the observer of routers, the
documents of attention.

It is kept in a context variable instead of being passed to the model, so that a recomputed layer
finds that of its own micro-batch, in any pipeline stage, even while another one is in flight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Result = TypeVar("Result")


class PassState(Generic[T]):
    """One such state; None outside of passes."""

    def __init__(self, name: str) -> None:
        self._current: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """The state of the current pass."""
        return self._current.get()

    @contextmanager
    def use(self, state: T | None) -> Iterator[None]:
        """Context manager that sets the state."""
        before = self._current.set(state)
        try:
            yield
        finally:
            self._current.reset(before)

    def preserve(self, run: Callable[..., Result]) -> Callable[..., Result]:
        """Wrap `run` so that later calls, such as recomputation, have the state of now."""
        state = self.get()

        def run_with_state(*args: Any, **kwargs: Any) -> Result:
            with self.use(state):
                return run(*args, **kwargs)

        return run_with_state
