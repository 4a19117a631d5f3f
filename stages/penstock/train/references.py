"""What a reference model makes of the answers in micro-batches."""

from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.rows.answer_scores import AnswerScores
from penstock.rows.batches import Cursor
from penstock.rows.collate import MicroBatch


class References:
    """Those of the model that training starts from, as the stage `reference` has left them."""

    def __init__(self, folder: Path) -> None:
        """Read them. Raises ArtifactError for a file that cannot be read."""
        self._scores = AnswerScores(folder)

    def begin(self, step: int, cursor: Cursor) -> None:
        """The step with this number, from 0, whose rows begin at `cursor`, is next. Called by all
        ranks."""
        del step, cursor

    def of(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities of each micro-batch's answers, fp64 [D, A]. Raises ArtifactError for
        a sample that there is none of."""
        return [
            torch.from_numpy(self._scores.of(batch.branching.samples if batch.branching else ()))
            for batch in batches
        ]
