"""Evaluation on held-out rows.

The metrics do not depend on the parallel layout: every trained token of the rows counts once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Protocol

import numpy as np

from penstock.config.loading.fault import shown
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError, StageError
from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.rows.batches import Integers, assign_micro_batches
from penstock.rows.collate import MicroBatch
from penstock.rows.reader import PackedRows
from penstock.train.dataloader import Groups, LoaderConfig, read
from penstock.train.eval.preference_metrics import PreferenceMetrics
from penstock.train.eval.reference_model import References
from penstock.train.eval.token_metrics import LOSS, TokenMetrics
from penstock.train.launch.job import Job


class EvalMetric(Protocol):
    """A metric accumulated over rows, the same on all ranks."""

    @property
    def names(self) -> list[str]:
        """The keys of `record`."""
        ...

    def reset(self) -> None:
        """Reset the accumulated values."""
        ...

    def update(self, batches: Sequence[MicroBatch]) -> None:
        """Accumulate over this rank's micro-batches. Collective."""
        ...

    def compute(self) -> dict[str, float]:
        """Reduce over all ranks and return the metrics. Collective."""
        ...


class Evaluator:
    """Evaluates on a fixed set of packed rows."""

    def __init__(
        self,
        rows: PackedRows,
        built: BuiltModel,
        ranks: ProcessInfo,
        train: TrainConfig,
        reading: LoaderConfig,
        *,
        rows_per_batch: int,
        teller: EvalMetric | None = None,
    ) -> None:
        """`rows_per_batch` is the batch size for settings that count batches. The default metric is
        the token loss."""
        self._rows, self._built, self._ranks = rows, built, ranks
        # Micro-batches are computed one by one, so they need no common length.
        self._reading = replace(reading, pad_to="own")
        self._size = train.eval_micro_batch_size or train.micro_batch_size
        self._rows_per_batch = rows_per_batch
        self._chosen = chosen_rows(len(rows), train.eval_max_batches, rows_per_batch)
        self._costs = built.pairs_per_token * rows.lengths() + rows.squares()
        self._teller = teller or TokenMetrics(rows, built, ranks)

    def __len__(self) -> int:
        """Number of evaluation rows."""
        return len(self._chosen)

    @property
    def names(self) -> list[str]:
        """The keys of `evaluate`."""
        return self._teller.names

    def sanity_check(self, batches: int, is_asked_to_stop: Callable[[], object]) -> None:
        """Evaluate `batches` batches of the most expensive rows without logging, as a memory and
        sanity check.

        Raises StageError if the loss is not finite. Collective.
        """
        found = self.evaluate(is_asked_to_stop, most_rows=batches * self._rows_per_batch)
        if found and not math.isfinite(found[LOSS]):
            raise StageError(
                f"before the first step the loss of {batches} batch(es) of held-out rows is "
                f"{found[LOSS]}, so every evaluation would be broken.\n"
                "  Look at the weights of model.model_path and at the held-out rows; "
                "train.eval_sanity_batches: 0 trains without this look at them."
            )

    def evaluate(
        self, is_asked_to_stop: Callable[[], object], *, most_rows: int | None = None
    ) -> dict[str, float] | None:
        """Return the metrics over the rows, by name.

        None if any rank is asked to stop before the end. Evaluates at most `most_rows`, the most
        expensive ones; by default all. Collective; all ranks get the same result.
        """
        self._teller.reset()
        # Sort by cost, so that replicas compute rows of similar cost at the same time.
        by_cost = np.argsort(-self._costs[self._chosen], kind="stable")
        dearest_first = self._chosen[by_cost][:most_rows]
        at_once = self._built.degrees.num_replicas * self._size
        for start in range(0, len(dearest_first), at_once):
            if self._ranks.any_rank(bool(is_asked_to_stop())):
                return None
            self._ranks.pulse.set_phase("evaluating")
            mine = self._mine(dearest_first[start : start + at_once])
            self._teller.update(read(self._rows, mine, self._reading))
        return self._teller.compute()

    def _mine(self, rows: Integers) -> Groups:
        """The rows that this rank's replica evaluates."""
        return assign_micro_batches(
            rows.tolist(),
            self._costs[rows].tolist(),
            num_replicas=self._built.degrees.num_replicas,
            size=self._size,
            count=1,
        )[self._built.engine.layout.mesh.index("replicate", "shard")]


def held_out_rows(
    job: Job,
    built: BuiltModel,
    ranks: ProcessInfo,
    reading: LoaderConfig,
    rows_per_batch: int,
) -> Evaluator | None:
    """Build the evaluator of a run; None if there is no held-out data, or no evaluation is
    configured.

    Raises ConfigError if evaluation is configured and there is no held-out data.
    """
    train = job.config.train
    folder = job.packed / "data" / "validation"
    found = None
    if folder.is_dir():
        rows = PackedRows(folder)
        preferences = built.engine.preferences
        # Fixed reference log-probs even if the training reference moves, so that evaluations are
        # comparable.
        references = References(job.scores) if job.scores else None
        teller = PreferenceMetrics(preferences, references) if preferences else None
        size = train.eval_rows_per_batch or rows_per_batch
        found = Evaluator(rows, built, ranks, train, reading, rows_per_batch=size, teller=teller)
    asking = ("eval_only", "eval_at_start", "eval_steps", "eval_epochs", "eval_sanity_batches")
    asked = [name for name in asking if getattr(train, name)]
    # Zero batches is a valid setting, except for a run that only evaluates.
    if asked and (found is None or (train.eval_only and not found)):
        raise ConfigError(
            f"train.{asked[0]} is {shown(getattr(train, asked[0]))}, "
            "and there is no row to evaluate on.\n"
            "  Write data.test_datasets or data.val_set_size, and leave out "
            "train.eval_max_batches: 0."
        )
    return found or None


def chosen_rows(num_rows: int, limit: int | float | None, rows_per_batch: int) -> Integers:
    """The rows that `train.eval_max_batches` selects, spread over all held-out data."""
    count = num_rows
    if isinstance(limit, float):
        count = math.ceil(Fraction(str(limit)) * num_rows)
    elif limit is not None:
        count = min(num_rows, limit * rows_per_batch)
    return np.arange(count, dtype=np.int64) * num_rows // max(1, count)
