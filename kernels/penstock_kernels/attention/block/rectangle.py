"""Which keys of a block a query sees: all of them, or those of its own document's past."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock_kernels.attention.segments import Segments


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Each of some queries sees every one of some keys."""

    num_queries: int
    num_keys: int
    cu_queries: torch.Tensor
    """int32 [2] on the device: 0 and their number."""
    cu_keys: torch.Tensor
    """int32 [2]."""

    @staticmethod
    def several(
        sizes: Sequence[tuple[int, int]], device: torch.device | str = "cpu"
    ) -> list["Rectangle"]:
        """One for each pair of queries and keys, at the price of one copy to the device."""
        bounds = [((0, queries), (0, keys)) for queries, keys in sizes]
        laid = torch.tensor(bounds, dtype=torch.int32, device=device).unbind()
        return [Rectangle(*size, *pair.unbind()) for size, pair in zip(sizes, laid, strict=True)]


Sees = Rectangle | Segments
"""Segments: queries and keys are the same tokens, and attention is causal within each document."""


def refuses_sizes(q_QNH: torch.Tensor, k_SKH: torch.Tensor, sees: Sees) -> str | None:
    """Whether there are as many queries and keys as `sees` speaks of."""
    if isinstance(sees, Rectangle):
        expected = (sees.num_queries, sees.num_keys)
    else:
        expected = (sees.num_tokens, sees.num_tokens)
    got = (q_QNH.shape[0], k_SKH.shape[0])
    if got == expected:
        return None
    return f"there are {got[0]} queries and {got[1]} keys, for {expected[0]} and {expected[1]}"
