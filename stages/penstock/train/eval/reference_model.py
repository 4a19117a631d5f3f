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
from penstock.rows.filter_rows import iter_new_samples
from penstock.rows.reader import PackedRows, Row
from penstock.rows.ref_logprobs import FILES, RefLogprobs, write_shared_scores
from penstock.train.eval.reference_logprobs import LogprobScorer
from penstock.train.launch.job import Job


class RefModel:
    """Reference log-probs of the initial model, computed by the stage `reference`."""

    def __init__(self, folder: Path) -> None:
        """Read the log-probs. Raises ArtifactError for an unreadable file."""
        self._scores = RefLogprobs(folder)

    def on_step_start(self, step: int, cursor: Cursor) -> None:
        """Prepare for step `step` (from 0), whose rows begin at `cursor`. Collective."""
        del step, cursor

    def lookup(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Reference log-probs of each micro-batch's completions, fp64 [D, A]. Raises ArtifactError
        for a sample without log-probs."""
        return [
            torch.from_numpy(self._scores.get(batch.branching.samples if batch.branching else ()))
            for batch in batches
        ]


REFERENCES_FOLDER = "references"

# Updates whose log-probs are kept: the newest checkpoint may be older than the last update.
NUM_KEPT = 2


class SyncedRefModel(RefModel):
    """Reference log-probs that are updated; before the first update, those of the initial model."""

    def __init__(
        self,
        job: Job,
        built: BuiltModel,
        ranks: ProcessInfo,
        rows: PackedRows,
        batches: StepSampler,
    ) -> None:
        assert job.ref_logprobs is not None
        super().__init__(job.ref_logprobs)
        self._update_steps = job.config.preference.ref_update_steps
        self._scorer, self._ranks = LogprobScorer(job.config, built, ranks), ranks
        self._rows, self._batches = rows, batches
        self._root = job.output_dir / REFERENCES_FOLDER
        self._last_update = 0
        """The step of the last update."""

    def on_step_start(self, step: int, cursor: Cursor) -> None:
        """Update the reference if this step is due, or load the last update of a resumed run.

        Raises ArtifactError if its files are missing.
        """
        last = step - step % self._update_steps
        if last == self._last_update:
            return
        folder = self._root / f"step_{last}"
        if last == step:
            self._update(folder, cursor)
        elif self._ranks.any_rank(not any(folder.glob(FILES))):
            raise ArtifactError(
                f"{folder} has no reference log-probs of the model of step {last}, which this run "
                f"needs (preference.ref_update_steps: {self._update_steps}).\n"
                "  Start from the weights alone, with train.init_checkpoint_path."
            )
        self._scores, self._last_update = RefLogprobs(folder), last

    def _update(self, folder: Path, cursor: Cursor) -> None:
        chunks = list(self._scorer.iter_chunks(self._rows_until_next_update(cursor)))
        if self._ranks.is_main_process:
            remove(folder)
            samples = [sample for scored in chunks for sample in scored.samples]
            write_shared_scores(
                folder, samples, np.concatenate([scored.logprobs for scored in chunks])
            )
            updates = sorted(self._root.glob("step_*"), key=lambda path: int(path.name[5:]))
            for old in updates[:-NUM_KEPT]:
                remove(old)
        # All ranks read the files next.
        self._ranks.barrier()

    def _rows_until_next_update(self, cursor: Cursor) -> Iterator[Row]:
        """The rows with the samples of all steps until the next update, without duplicates."""
        numbers: set[int] = set()
        for _ in range(self._update_steps):
            numbers.update(self._batches.rows(cursor).tolist())
            cursor = self._batches.advance(cursor)
        return iter_new_samples((self._rows.row(number) for number in sorted(numbers)), ())


def build_ref_model(
    job: Job, built: BuiltModel, ranks: ProcessInfo, rows: PackedRows, batches: StepSampler
) -> RefModel | None:
    """Build the reference log-probs of training; None if the loss needs none."""
    if job.ref_logprobs is None:
        return None
    if job.config.preference.ref_update_steps > 0:
        return SyncedRefModel(job, built, ranks, rows, batches)
    return RefModel(job.ref_logprobs)
