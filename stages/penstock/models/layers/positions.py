"""Positions as a learned table that is added to embeddings.

T tokens, P rows of the table, D model width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import LearnedPositions


def _all_of_them(position_ids_T: torch.Tensor) -> torch.Tensor:
    return position_ids_T


class PositionTable(nn.Module):
    """A row [D] for each position in a document.

    `positions_here` is a socket: from the positions of the pass's tokens to those of the tokens
    whose embeddings arrive here.
    """

    def __init__(self, positions: LearnedPositions, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions.rows, width))
        self.first, self.learned = positions.first, positions.rows - positions.first
        self.positions_here: Callable[[torch.Tensor], torch.Tensor] = _all_of_them

    def forward(self, position_ids_T: torch.Tensor) -> torch.Tensor:
        """Those of position ids [T], from 0 in each document, [T, D].

        Raises ValueError on a CPU for a position beyond the table; on a GPU it ends the process.
        """
        at_T = self.positions_here(position_ids_T)
        if at_T.device.type != "cpu":
            torch._assert_async((at_T < self.learned).all(), "more positions than are learned")
        elif len(at_T) and (last := int(at_T.max())) >= self.learned:
            raise ValueError(
                f"a document has more than {last} tokens, and the model learns {self.learned}"
                " positions; write a data.sample_packing_sequence_len of at most as many"
            )
        return F.embedding(at_T + self.first, self.weight)
