"""Pages: where the keys and values of sequences are in a paged KV cache (Kwon et al. 2023,
"PagedAttention", arXiv:2309.06180).

A page holds `page_size` consecutive tokens of a sequence; pages of a sequence are in any order, and
may be part of several sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from penstock_kernels.to_device import to_device


@dataclass(frozen=True, eq=False)
class PagedSequences:
    """The sequences of a pass: their newest tokens are the queries, and their cached tokens, the
    newest included, the keys. Built once, used by every layer with these pages."""

    page_size: int
    tables: Sequence[Sequence[int]]
    """The page of each `page_size` tokens of a sequence. Entries of pages that no query sees are
    arbitrary."""
    num_queries: Sequence[int]
    """New tokens of each sequence, at least one; those of one sequence follow one another."""
    num_keys: Sequence[int]
    """Tokens of each sequence, the new ones included."""
    device: torch.device
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values that backends compute once for all layers."""

    @property
    def total_queries(self) -> int:
        return sum(self.num_queries)

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has a single query."""
        return len(self.num_queries) == self.total_queries

    def first_key(self, sequence: int, window: int | None) -> int:
        """The first key that a query of the sequence sees."""
        if window is None:
            return 0
        return max(0, self.num_keys[sequence] - self.num_queries[sequence] + 1 - window)

    def index_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int32, on the device: the tables, padded with 0, [sequences, pages]; the first query of
        each sequence, and the end, [sequences + 1]; the keys of each sequence, [sequences]."""
        if "index tensors" not in self.memo:
            width = max(map(len, self.tables))
            padded = [[*table, *[0] * (width - len(table))] for table in self.tables]
            starts = (0, *accumulate(self.num_queries))
            self.memo["index tensors"] = (
                self._to_device(padded),
                self._to_device(starts),
                self._to_device(self.num_keys),
            )
        return self.memo["index tensors"]

    def _to_device(self, numbers: Sequence[Any]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int32), self.device)
