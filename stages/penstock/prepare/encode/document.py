"""Text that is ready to be encoded, and which of its characters are trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Span = tuple[int, int]
"""Characters from the first number up to the second."""


@dataclass(slots=True)
class Document:
    """A text that becomes the tokens of one sample, or of one side of a pair."""

    text: str

    spans: tuple[Span, ...] | None = None
    """What is trained, in order and apart from each other; None: all of it."""

    borders: Literal["cut", "kept"] = "kept"
    """What becomes of a token that a span begins or ends within. `kept`: it is trained whole, as
    transformers does it. `cut`: the text is encoded in parts there, so that the tokens before a
    span are those of its prompt alone, as a model gets it."""

    droppable_turns: int = 0
    """Oldest turns it could do without."""

    drop_turns: Callable[[int], "Document"] | None = None
    """The document without so many of them. Raises BadRecord where the rest has no form."""
