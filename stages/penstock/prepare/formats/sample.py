"""What every format gives back, and the small steps they share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.prepare.faults import BadRow
from penstock.rows.schema import IGNORED

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Sample:
    """One document: `labels[t]` is `input_ids[t]` where it is trained, -100 elsewhere."""

    input_ids: Tokens
    labels: Tokens

    @classmethod
    def where(cls, input_ids: Sequence[int], trained: Sequence[int]) -> "Sample":
        """Train the tokens whose `trained` is not zero."""
        ids = np.array(input_ids, dtype=np.int32)
        mask = np.array(trained, dtype=bool)
        return cls(ids, np.where(mask, ids, np.int32(IGNORED)))

    def cut(self, max_tokens: int) -> "Sample":
        """The first `max_tokens` tokens."""
        return Sample(self.input_ids[:max_tokens], self.labels[:max_tokens])

    @property
    def is_trained(self) -> bool:
        """Whether a token is the target of another: the first one never is."""
        return bool((self.labels[1:] != IGNORED).any())


Record = Mapping[str, Any]
Encoder = Callable[[Sequence[Record]], list[Sample | BadRow]]
"""Records to samples, in order, one for each."""


def each(encode: Callable[[Any], Sample], records: Sequence[Any]) -> list[Sample | BadRow]:
    """Encode one by one, keeping the fault of each that has one."""
    found: list[Sample | BadRow] = []
    for record in records:
        try:
            found.append(encode(record))
        except BadRow as fault:
            found.append(fault)
    return found
