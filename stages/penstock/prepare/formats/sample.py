"""Output types of formats: conversations, pairs, rated completions, texts or token ids."""

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
    """A document; all of its tokens are trained."""

    text: str


@dataclass(slots=True)
class TokenizedSample:
    """A tokenized record: `labels[t]` is `input_ids[t]` if trained, else -100."""

    input_ids: Tokens
    labels: Tokens


Parsed = Conversation | PreferencePair | RatedCompletion | Text | TokenizedSample
Record = Mapping[str, Any]
Format = Callable[[DatasetSettings, Record], Parsed]
"""Parses a record. Raises BadRecord if it cannot be used."""
