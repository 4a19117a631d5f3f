"""The tokens of images in the pass of a micro-batch, by which a MoE layer chooses a router.

They are kept in a context variable, as router observers are (`router_observer.py`), so that a
recomputed layer finds those of its own micro-batch in any pipeline stage.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModalityTokens:
    """The tokens of each modality among those that a MoE layer computes on this rank."""

    is_text_T: torch.Tensor  # noqa: N815 - T names the dimension
    """int64: 1, or 0 for a token of an image."""
    text: torch.Tensor
    """The places of the tokens of text, int64."""
    images: torch.Tensor
    """The places of the tokens of images."""


_CURRENT: ContextVar[ModalityTokens | None] = ContextVar("modality_tokens", default=None)


@contextmanager
def route_modalities(tokens: ModalityTokens | None) -> Iterator[None]:
    """Context manager that sets the tokens of the pass; None: all are text, and the routers and
    experts of images are not called."""
    before = _CURRENT.set(tokens)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def current_modalities() -> ModalityTokens | None:
    """The tokens of the current pass, or None."""
    return _CURRENT.get()


def preserve_modalities(run: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `run` so that later calls, such as recomputation, use the tokens that are current
    now."""
    tokens = current_modalities()

    def run_with_modalities(*args: Any) -> Result:
        with route_modalities(tokens):
            return run(*args)

    return run_with_modalities
