"""Mask of a block: all keys, a sliding window, or causal within documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.to_device import to_device


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Each query attends to every key of the block, or to the part of its sliding window that is in
    the block.
    """

    num_queries: int
    num_keys: int
    cu_queries: torch.Tensor
    """int32 [2] on the device: 0 and the number of queries."""
    cu_keys: torch.Tensor
    """int32 [2]."""
    reach: int | None = None
    """Query i sees the keys from number `i - reach` on, of which there is at least one; None: all.
    From 0 to 2 less than there are queries: no key but some query sees it, and some do not."""

    @staticmethod
    def several(
        sizes: Sequence[tuple[int, int]],
        device: torch.device | str = "cpu",
        *,
        reaches: Sequence[int | None] = (),
    ) -> list["Rectangle"]:
        """One for each pair of queries and keys, at the price of one copy to the device. reaches
        are theirs in turn; None where there are no more."""
        bounds = [((0, queries), (0, keys)) for queries, keys in sizes]
        laid = to_device(torch.tensor(bounds, dtype=torch.int32), device).unbind()
        return [
            Rectangle(queries, keys, of_queries, of_keys, reach)
            for (queries, keys), (of_queries, of_keys), reach in zip_longest(sizes, laid, reaches)
        ]

    def hidden_keys(self, device: torch.device) -> torch.Tensor | None:
        """bool [Q, S]: keys that are masked for a query; None if none are."""
        if self.reach is None:
            return None
        first_Q1 = torch.arange(self.num_queries, device=device).unsqueeze(1) - self.reach
        return torch.arange(self.num_keys, device=device) < first_Q1


Sees = Rectangle | VarlenMetadata
"""Segments: queries and keys are the same tokens, and attention is causal within each document."""


def unsupported_sizes(q_QNH: torch.Tensor, k_SKH: torch.Tensor, sees: Sees) -> str | None:
    """Reason if the numbers of queries and keys differ from those of `sees`."""
    if isinstance(sees, Rectangle):
        expected = (sees.num_queries, sees.num_keys)
    else:
        expected = (sees.num_tokens, sees.num_tokens)
    got = (q_QNH.shape[0], k_SKH.shape[0])
    if got == expected:
        return None
    return f"there are {got[0]} queries and {got[1]} keys, for {expected[0]} and {expected[1]}"
