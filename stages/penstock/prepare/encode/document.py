"""Rendered text with the character spans that are trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """[start, stop) in characters, of what one message trains."""

    start: int
    stop: int
    message: int = 0
    """Index of the message in its conversation."""


@dataclass(slots=True)
class Document:
    """The text of one sample, or of one side of a pair."""

    text: str

    spans: tuple[Span, ...] | None = None
    """Trained spans, sorted and disjoint; None: the whole text. A token that overlaps one is
    trained."""

    lacks_end: bool = False
    """Whether a trained turn has no token that ends it."""

    droppable_turns: int = 0
    """Number of oldest turns that may be dropped."""

    drop_turns: Callable[[int], "Document"] | None = None
    """Renders the document without the given number of oldest turns. Raises BadRecord if the chat
    template cannot render the rest."""

    images: tuple[bytes, ...] = ()
    """Digests of its images, in order."""

    image_tokens: tuple[int, ...] = ()
    """Number of image tokens of each image."""

    weights: tuple[float, ...] | None = None
    """Loss weight of each span; None: 1."""
