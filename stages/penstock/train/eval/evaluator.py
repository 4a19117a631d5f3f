"""Evaluation on held-out rows.

The metrics do not depend on the parallel layout: every trained token of the rows counts once.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from penstock.config.loading.fault import shown
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError, StageError
from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.losses.preference import Preferences
from penstock.rows.batches import Integers
from penstock.rows.reader import PackedRows
from penstock.train.dataloader import LoaderConfig, read
from penstock.train.eval.metrics import LOSS, EvalMetric, PreferenceMetrics, TokenMetrics
from penstock.train.eval.reference_model import RefModel
from penstock.train.launch.job import Job
from penstock.train.row_costs import local_micro_batches, row_costs


class Evaluator:
    """Evaluates on a fixed set of packed rows."""

    def __init__(
        self,
        rows: PackedRows,
        built: BuiltModel,
        ranks: ProcessInfo,
        train: TrainConfig,
        loader_config: LoaderConfig,
        *,
        rows_per_batch: int,
        metric: EvalMetric | None = None,
    ) -> None:
        """`rows_per_batch` is the batch size for settings that count batches. The default metric is
        the token loss."""
        self._rows, self._built, self._ranks = rows, built, ranks
        # Micro-batches are computed one by one, so they need no common length.
        self._loader_config = replace(loader_config, pad_to="own")
        self._micro_batch_size = train.eval_micro_batch_size or train.rows_at_once
        self._rows_per_batch = rows_per_batch
        self._row_ids = select_eval_rows(len(rows), train.eval_max_batches, rows_per_batch)
        self._costs = row_costs(built, rows).total
        self._metric = metric or TokenMetrics(rows, built, ranks, train.eval_metrics)

    def __len__(self) -> int:
        return len(self._row_ids)

    @property
    def names(self) -> list[str]:
        """The keys of `evaluate`."""
        return self._metric.names

    def sanity_check(self, batches: int, is_asked_to_stop: Callable[[], object]) -> None:
        """Evaluate `batches` batches of the most expensive rows without logging, as a memory and
        sanity check.

        Raises StageError if the loss is not finite. Collective.
        """
        metrics = self.evaluate(is_asked_to_stop, max_rows=batches * self._rows_per_batch)
        if metrics and not math.isfinite(metrics[LOSS]):
            raise StageError(
                f"before the first step the loss of {batches} batch(es) of evaluation rows is "
                f"{metrics[LOSS]}, so every evaluation would be invalid.\n"
                "  Check the weights of model.model_path and the evaluation data; "
                "train.eval_sanity_batches: 0 disables this check."
            )

    def evaluate(
        self, is_asked_to_stop: Callable[[], object], *, max_rows: int | None = None
    ) -> dict[str, float] | None:
        """Return the metrics over the rows, by name.

        None if any rank is asked to stop before the end. Evaluates at most `max_rows`, the most
        expensive ones; by default all. Collective; all ranks get the same result.
        """
        self._metric.reset()
        # Sort by cost, so that replicas compute rows of similar cost at the same time.
        # Stable: NumPy's default sort orders ties as the processor's instruction set has it, and
        # replicas on unlike machines must agree on the rows of each round.
        by_cost = np.argsort(-self._costs[self._row_ids], kind="stable")
        by_cost_rows = self._row_ids[by_cost][:max_rows]
        rows_per_round = self._built.dims.num_replicas * self._micro_batch_size
        for start in range(0, len(by_cost_rows), rows_per_round):
            if self._ranks.any_rank(bool(is_asked_to_stop())):
                return None
            self._ranks.heartbeat.set_phase("evaluating")
            rows = by_cost_rows[start : start + rows_per_round]
            costs, size = self._costs[rows].tolist(), self._micro_batch_size
            groups = local_micro_batches(self._built, rows.tolist(), costs, size=size, count=1)
            self._metric.update(read(self._rows, groups, self._loader_config))
        return self._metric.compute()


def build_evaluator(
    job: Job,
    built: BuiltModel,
    ranks: ProcessInfo,
    loader_config: LoaderConfig,
    rows_per_batch: int,
) -> Evaluator | None:
    """Build the evaluator of a run; None if there is no held-out data, or no evaluation is
    configured.

    Raises ConfigError if evaluation is configured and there is no held-out data.
    """
    train = job.config.train
    folder = job.packed_dir / "data" / "validation"
    evaluator = None
    if folder.is_dir():
        rows = PackedRows(folder)
        preferences = built.engine.part(Preferences)
        # Fixed reference log-probs even if the training reference moves, so that evaluations are
        # comparable.
        references = RefModel(job.ref_logprobs) if job.ref_logprobs else None
        metric = PreferenceMetrics(preferences, references) if preferences else None
        size = train.eval_rows_per_batch or rows_per_batch
        evaluator = Evaluator(
            rows, built, ranks, train, loader_config, rows_per_batch=size, metric=metric
        )
    eval_fields = ("eval_only", "eval_at_start", "eval_steps", "eval_epochs", "eval_sanity_batches")
    enabled = [name for name in eval_fields if getattr(train, name)]
    # Zero batches is a valid setting, except for a run that only evaluates.
    if enabled and (evaluator is None or (train.eval_only and not evaluator)):
        raise ConfigError(
            f"train.{enabled[0]} is {shown(getattr(train, enabled[0]))}, "
            "and there is no evaluation data.\n"
            "  Write data.test_datasets or data.val_set_size, and remove "
            "train.eval_max_batches: 0."
        )
    return evaluator or None


def select_eval_rows(num_rows: int, limit: int | float | None, rows_per_batch: int) -> Integers:
    """The rows that `train.eval_max_batches` selects, spread over all held-out data."""
    count = num_rows
    if isinstance(limit, float):
        count = math.ceil(Fraction(str(limit)) * num_rows)
    elif limit is not None:
        count = min(num_rows, limit * rows_per_batch)
    return np.arange(count, dtype=np.int64) * num_rows // max(1, count)
