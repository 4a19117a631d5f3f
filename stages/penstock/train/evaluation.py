"""How good a model is at rows that it does not learn from: the records that evaluations are.

The numbers do not depend on the layout: every trained token of the same rows is counted once.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from penstock.config.faults import shown
from penstock.config.train import TrainConfig
from penstock.core.errors import ConfigError, StageError
from penstock.engine.assemble import Assembled
from penstock.engine.ranks import Ranks
from penstock.rows.batches import Integers, deal
from penstock.rows.collate import MicroBatch
from penstock.rows.reader import PackedRows
from penstock.rows.sources import Sources
from penstock.train.job import Job
from penstock.train.loader import Groups, Reading, read

LOSS, PERPLEXITY, ACCURACY = "eval_loss", "eval_perplexity", "eval_token_accuracy"


class HeldOut:
    """Packed rows to evaluate on, the same ones each time."""

    def __init__(
        self,
        rows: PackedRows,
        built: Assembled,
        ranks: Ranks,
        train: TrainConfig,
        reading: Reading,
        *,
        rows_per_batch: int,
    ) -> None:
        """`rows_per_batch` make one of `train.eval_max_batches`."""
        self._rows, self._built, self._ranks = rows, built, ranks
        # Micro-batches are computed one by one, however long others are.
        self._reading = replace(reading, pad_to="own")
        self._size = train.eval_micro_batch_size or train.micro_batch_size
        self._rows_per_batch = rows_per_batch
        self._chosen = chosen_rows(len(rows), train.eval_max_batches, rows_per_batch)
        self._costs = built.pairs_per_token * rows.lengths() + rows.squares()
        self._sources = Sources.read(rows.folder)
        self._first_documents = np.cumsum(rows.documents()) - rows.documents()

    def __len__(self) -> int:
        """Rows that are evaluated on."""
        return len(self._chosen)

    @property
    def names(self) -> list[str]:
        """What `evaluate` tells."""
        labels = self._sources.labels if self._sources else ()
        return [LOSS, PERPLEXITY, ACCURACY, *(f"{LOSS}/{label}" for label in labels)]

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
        """Mean cross-entropy over the trained tokens, its exponential, the share of tokens that the
        model foretells, and the mean of each data set where there are several.

        None when any rank is asked to stop before the end. `most_rows` are evaluated on, the
        dearest ones; by default all. Called by all ranks; all get the same.
        """
        kinds = len(self._sources.labels) if self._sources else 1
        found = torch.zeros(kinds, 3, dtype=torch.float64, device=self._ranks.device)
        # Replicas compute rows of similar cost at the same time.
        by_cost = np.argsort(-self._costs[self._chosen], kind="stable")
        dearest_first = self._chosen[by_cost][:most_rows]
        at_once = self._built.degrees.num_replicas * self._size
        for start in range(0, len(dearest_first), at_once):
            if self._ranks.anywhere(bool(is_asked_to_stop())):
                return None
            self._ranks.pulse.begins("evaluating")
            mine = self._mine(dearest_first[start : start + at_once])
            batches = read(self._rows, mine, self._reading)
            found += self._built.onlooker.counts(batches, [*map(self._kinds, batches)], kinds)
        return self._record(self._ranks.total(found).tolist())

    def _record(self, counts: list[list[float]]) -> dict[str, float]:
        loss, tokens, right = (sum(column) for column in zip(*counts, strict=True))
        mean = loss / max(1, tokens)
        record = {LOSS: mean, PERPLEXITY: perplexity(mean), ACCURACY: right / max(1, tokens)}
        if self._sources:
            of_each = zip(self._sources.labels, counts, strict=True)
            record |= {f"{LOSS}/{label}": its[0] / its[1] for label, its in of_each if its[1]}
        return record

    def _mine(self, rows: Integers) -> Groups:
        """Those of the rows that this rank's replica evaluates."""
        return deal(
            rows.tolist(),
            self._costs[rows].tolist(),
            num_replicas=self._built.degrees.num_replicas,
            size=self._size,
            count=1,
        )[self._built.engine.layout.mesh.index("replicate", "shard")]

    def _kinds(self, batch: MicroBatch) -> torch.Tensor:
        """Number of the data set of each token [T]; padding has labels of none."""
        kinds = np.zeros(sum(batch.lengths), dtype=np.int64)
        start = 0
        for number, size in batch.rows if self._sources else ():
            lengths = self._rows.row(number).lengths
            first = self._first_documents[number]
            its = self._sources.of_documents[first : first + len(lengths)] if self._sources else 0
            kinds[start : start + size] = np.repeat(its, lengths)
            start += size
        return torch.from_numpy(kinds)


def held_out_rows(
    job: Job, built: Assembled, ranks: Ranks, reading: Reading, rows_per_batch: int
) -> HeldOut | None:
    """What a run evaluates on; None where nothing is held out, or nothing of it is wanted.

    Raises ConfigError where evaluations are asked for, and there is nothing.
    """
    train = job.config.train
    folder = job.packed / "data" / "validation"
    found = None
    if folder.is_dir():
        rows = PackedRows(folder)
        found = HeldOut(rows, built, ranks, train, reading, rows_per_batch=rows_per_batch)
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


def perplexity(loss: float) -> float:
    """The exponential of a mean loss, infinite where no number is that large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
