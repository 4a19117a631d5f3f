"""What a format makes of a record: something said, a text, or tokens. None of it is encoded yet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.prepare.formats.conversation import Conversation, PreferencePair, RatedCompletion
from penstock.prepare.settings import DatasetSettings

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class Text:
    """A document that is trained whole."""

    text: str


@dataclass(slots=True)
class TokenizedSample:
    """A sample as it is: `labels[t]` is `input_ids[t]` where that is trained, -100 elsewhere."""

    input_ids: Tokens
    labels: Tokens


Parsed = Conversation | PreferencePair | RatedCompletion | Text | TokenizedSample
Record = Mapping[str, Any]
Format = Callable[[DatasetSettings, Record], Parsed]
"""What a record says. Raises BadRecord where it says nothing."""
