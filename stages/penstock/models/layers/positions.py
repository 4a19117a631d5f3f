"""Learned position embeddings.

T tokens, P rows of the table, D model width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import LearnedPositions
from penstock.models.layers.call_hook import no_op


class PositionTable(nn.Module):
    """One embedding [D] for each position in a document.

    Under sequence parallelism the `local_positions` hook maps the positions of the pass's tokens to
    those of the local tokens.
    """

    def __init__(self, positions: LearnedPositions, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions.rows, width))
        self.first, self.learned = positions.first, positions.rows - positions.first
        self.local_positions: Callable[[torch.Tensor], torch.Tensor] = no_op

    def forward(self, position_ids_T: torch.Tensor) -> torch.Tensor:
        """The embeddings [T, D] of position ids [T], which start at 0 in each document.

        For a position beyond the table it raises ValueError on a CPU; on a GPU a device-side
        assertion ends the process.
        """
        at_T = self.local_positions(position_ids_T)
        # Reading the largest position of a GPU's tensor would wait for the GPU.
        if at_T.device.type != "cpu":
            torch._assert_async((at_T < self.learned).all(), "more positions than are learned")
        elif len(at_T) and (last := int(at_T.max())) >= self.learned:
            raise ValueError(
                f"a document has more than {last} tokens, and the model learns {self.learned}"
                " positions; write a data.sample_packing_sequence_len of at most as many"
            )
        return F.embedding(at_T + self.first, self.weight)
