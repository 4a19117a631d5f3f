"""Rendered text with the character spans that are trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Span = tuple[int, int]
"""[start, stop) in characters."""


@dataclass(slots=True)
class Document:
    """The text of one sample, or of one side of a pair."""

    text: str

    spans: tuple[Span, ...] | None = None
    """Trained spans, sorted and disjoint; None: the whole text."""

    borders: Literal["cut", "kept"] = "kept"
    """Tokens across the border of a span. `kept`: trained, as in transformers. `cut`: the text is
    encoded in parts at the border, so that the prompt has the same tokens as at inference."""

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
