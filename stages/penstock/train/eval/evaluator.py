"""How good a model is at rows that it does not learn from: the records that evaluations are.

The numbers do not depend on the layout: every trained token of the same rows is counted once.
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
    """What looks at rows and tells something of them, the same on all ranks."""

    @property
    def names(self) -> list[str]:
        """What `record` tells."""
        ...

    def begin(self) -> None:
        """Forget what has been seen."""
        ...

    def see(self, batches: Sequence[MicroBatch]) -> None:
        """Look at this rank's micro-batches. Called by all ranks."""
        ...

    def record(self) -> dict[str, float]:
        """What there is to tell of all that all ranks have seen. Called by all ranks."""
        ...


class Evaluator:
    """Packed rows to evaluate on, the same ones each time."""

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
        """`rows_per_batch` rows are a batch where batches are counted. Unless there is another
        `teller`, it is told how well tokens are foretold."""
        self._rows, self._built, self._ranks = rows, built, ranks
        # Micro-batches are computed one by one, however long others are.
        self._reading = replace(reading, pad_to="own")
        self._size = train.eval_micro_batch_size or train.micro_batch_size
        self._rows_per_batch = rows_per_batch
        self._chosen = chosen_rows(len(rows), train.eval_max_batches, rows_per_batch)
        self._costs = built.pairs_per_token * rows.lengths() + rows.squares()
        self._teller = teller or TokenMetrics(rows, built, ranks)

    def __len__(self) -> int:
        """Rows that are evaluated on."""
        return len(self._chosen)

    @property
    def names(self) -> list[str]:
        """What `evaluate` tells."""
        return self._teller.names

    def rehearse(self, batches: int, is_asked_to_stop: Callable[[], object]) -> None:
        """Evaluate on the dearest rows alone, so many `batches` of them, and tell nobody.

        Raises StageError if the loss is not finite. Called by all ranks.
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
        """What there is to tell of the rows, by name.

        None when any rank is asked to stop before the end. `most_rows` are evaluated on, the
        dearest ones; by default all. Called by all ranks; all get the same.
        """
        self._teller.begin()
        # Replicas compute rows of similar cost at the same time.
        by_cost = np.argsort(-self._costs[self._chosen], kind="stable")
        dearest_first = self._chosen[by_cost][:most_rows]
        at_once = self._built.degrees.num_replicas * self._size
        for start in range(0, len(dearest_first), at_once):
            if self._ranks.anywhere(bool(is_asked_to_stop())):
                return None
            self._ranks.pulse.begins("evaluating")
            mine = self._mine(dearest_first[start : start + at_once])
            self._teller.see(read(self._rows, mine, self._reading))
        return self._teller.record()

    def _mine(self, rows: Integers) -> Groups:
        """Those of the rows that this rank's replica evaluates."""
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
    """What a run evaluates on; None where nothing is held out, or nothing of it is wanted.

    Raises ConfigError where evaluations are asked for, and there is nothing.
    """
    train = job.config.train
    folder = job.packed / "data" / "validation"
    found = None
    if folder.is_dir():
        rows = PackedRows(folder)
        preferences = built.engine.preferences
        # Also where what is trained with moves: evaluations of a run are to be compared.
        references = References(job.scores) if job.scores else None
        teller = PreferenceMetrics(preferences, references) if preferences else None
        size = train.eval_rows_per_batch or rows_per_batch
        found = Evaluator(rows, built, ranks, train, reading, rows_per_batch=size, teller=teller)
    asking = ("eval_only", "eval_at_start", "eval_steps", "eval_epochs", "eval_sanity_batches")
    asked = [name for name in asking if getattr(train, name)]
    # No batches are a wish too, but for a run that does nothing else.
    if asked and (found is None or (train.eval_only and not found)):
        raise ConfigError(
            f"train.{asked[0]} is {shown(getattr(train, asked[0]))}, "
            "and there is no row to evaluate on.\n"
            "  Write data.test_datasets or data.val_set_size, and leave out "
            "train.eval_max_batches: 0."
        )
    return found or None


def chosen_rows(num_rows: int, limit: int | float | None, rows_per_batch: int) -> Integers:
    """The rows that `train.eval_max_batches` leaves, from all parts of what is held out."""
    count = num_rows
    if isinstance(limit, float):
        count = math.ceil(Fraction(str(limit)) * num_rows)
    elif limit is not None:
        count = min(num_rows, limit * rows_per_batch)
    return np.arange(count, dtype=np.int64) * num_rows // max(1, count)
