"""Reference model updates (TRL `sync_ref_model`): every n steps the reference becomes the current
model.

No second model is kept in memory. At an update, the current model computes the reference log-probs
of the completions of all steps until the next update. They are stored with the checkpoints, so that
an interrupted run can resume.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from penstock.core.errors import ArtifactError
from penstock.core.files import remove
from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.rows.batches import Cursor, StepSampler
from penstock.rows.collate import MicroBatch
from penstock.rows.filter_rows import each_once
from penstock.rows.reader import PackedRows, Row
from penstock.rows.ref_logprobs import FILES, AnswerScores, keep_scores
from penstock.train.eval.reference_logprobs import Scoring
from penstock.train.launch.job import Job


class References:
    """Reference log-probs of the initial model, computed by the stage `reference`."""

    def __init__(self, folder: Path) -> None:
        """Read the log-probs. Raises ArtifactError for an unreadable file."""
        self._scores = AnswerScores(folder)

    def begin(self, step: int, cursor: Cursor) -> None:
        """Prepare for step `step` (from 0), whose rows begin at `cursor`. Collective."""
        del step, cursor

    def of(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Reference log-probs of each micro-batch's completions, fp64 [D, A]. Raises ArtifactError
        for a sample without log-probs."""
        return [
            torch.from_numpy(self._scores.of(batch.branching.samples if batch.branching else ()))
            for batch in batches
        ]


FOLDER = "references"

KEPT = 2
"""Number of updates whose log-probs are kept: a checkpoint may be older than the last update."""


class SyncedRefModel(References):
    """Reference log-probs that are updated; before the first update, those of the initial model."""

    def __init__(
        self,
        job: Job,
        built: BuiltModel,
        ranks: ProcessInfo,
        rows: PackedRows,
        batches: StepSampler,
    ) -> None:
        assert job.scores is not None
        super().__init__(job.scores)
        self._every = job.config.preference.ref_update_steps
        self._scoring, self._ranks = Scoring(job.config, built, ranks), ranks
        self._rows, self._batches = rows, batches
        self._root = job.output_dir / FOLDER
        self._moved = 0
        """The step of the last update."""

    def begin(self, step: int, cursor: Cursor) -> None:
        """Update if due, or load the last update of a resumed run.

        Raises ArtifactError if its files are missing.
        """
        last = step - step % self._every
        if last == self._moved:
            return
        folder = self._root / f"step_{last}"
        if last == step:
            self._move(folder, cursor)
        elif self._ranks.any_rank(not any(folder.glob(FILES))):
            raise ArtifactError(
                f"{folder} does not say what the model of step {last} made of answers, which this "
                f"run compares with (preference.ref_update_steps: {self._every}).\n"
                "  Start from the weights alone, with train.init_checkpoint_path."
            )
        self._scores, self._moved = AnswerScores(folder), last

    def _move(self, folder: Path, cursor: Cursor) -> None:
        found = list(self._scoring.chunks(self._ahead(cursor)))
        if self._ranks.is_main_process:
            remove(folder)
            samples = [sample for scored in found for sample in scored.samples]
            keep_scores(folder, samples, np.concatenate([scored.scores for scored in found]))
            moves = sorted(self._root.glob("step_*"), key=lambda each: int(each.name[5:]))
            for old in moves[:-KEPT]:
                remove(old)
        self._ranks.barrier()

    def _ahead(self, cursor: Cursor) -> Iterator[Row]:
        """The rows with the samples of all steps until the next update, without duplicates."""
        numbers: set[int] = set()
        for _ in range(self._every):
            numbers.update(self._batches.rows(cursor).tolist())
            cursor = self._batches.advance(cursor)
        return each_once((self._rows.row(number) for number in sorted(numbers)), ())


def build_ref_model(
    job: Job, built: BuiltModel, ranks: ProcessInfo, rows: PackedRows, batches: StepSampler
) -> References | None:
    """Build the reference log-probs of training; None if the loss needs none."""
    if job.scores is None:
        return None
    if job.config.preference.ref_update_steps > 0:
        return SyncedRefModel(job, built, ranks, rows, batches)
    return References(job.scores)
