"""Evaluation metrics: of tokens, and of preferences."""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.losses.preference import CompletionLogProbs, Preferences
from penstock.losses.preference_metrics import ACCURACY, MARGINS, NAMES
from penstock.rows.collate import MicroBatch
from penstock.rows.reader import PackedRows
from penstock.rows.sources import Sources
from penstock.train.eval.reference_model import RefModel


class EvalMetric(Protocol):
    """A metric accumulated over rows, the same on all ranks."""

    @property
    def names(self) -> list[str]:
        """The keys of `compute`."""
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


PREFIX = "eval_"
LOSS, PERPLEXITY, TOKEN_ACCURACY = "eval_loss", "eval_perplexity", "eval_token_accuracy"


class TokenMetrics:
    """Mean cross-entropy over the trained tokens, weighted by their loss weights; perplexity; top-1
    token accuracy; the mean of each metric of `metrics`, of packages; and the mean loss of each
    data set if there are several."""

    def __init__(
        self, rows: PackedRows, built: BuiltModel, ranks: ProcessInfo, metrics: Iterable[str] = ()
    ) -> None:
        self._rows, self._built, self._ranks = rows, built, ranks
        self._metrics = [f"{PREFIX}{name}" for name in metrics]
        self._sources = Sources.read(rows.folder)
        self._first_documents = np.cumsum(rows.documents()) - rows.documents()
        self.reset()

    @property
    def names(self) -> list[str]:
        labels = self._sources.labels if self._sources else ()
        by_source = (f"{LOSS}/{label}" for label in labels)
        return [LOSS, PERPLEXITY, TOKEN_ACCURACY, *self._metrics, *by_source]

    def reset(self) -> None:
        self._num_sources = len(self._sources.labels) if self._sources else 1
        # float32 cannot count by ones beyond 2**24 tokens.
        self._counts = torch.zeros(
            self._num_sources,
            4 + len(self._metrics),
            dtype=torch.float64,
            device=self._ranks.device,
        )

    def update(self, batches: Sequence[MicroBatch]) -> None:
        source_ids = [*map(self._source_ids, batches)]
        self._counts += self._built.evaluator.counts(batches, source_ids, self._num_sources)

    def compute(self) -> dict[str, float]:
        counts: list[list[float]] = self._ranks.all_reduce_sum(self._counts).tolist()
        sums = [sum(column) for column in zip(*counts, strict=True)]
        loss, weight, tokens, correct, *metric_sums = sums
        # Held-out rows may have no trained token.
        mean = loss / (weight or 1)
        record = {
            LOSS: mean,
            PERPLEXITY: perplexity(mean),
            TOKEN_ACCURACY: correct / max(1, tokens),
        }
        record |= {
            name: total / (weight or 1)
            for name, total in zip(self._metrics, metric_sums, strict=True)
        }
        if self._sources:
            by_source = zip(self._sources.labels, counts, strict=True)
            record |= {f"{LOSS}/{label}": sums[0] / sums[1] for label, sums in by_source if sums[1]}
        return record

    def _source_ids(self, batch: MicroBatch) -> torch.Tensor:
        """Data set index of each token [T]; padding has labels of none."""
        source_ids = np.zeros(sum(batch.lengths), dtype=np.int64)
        start = 0
        for number, size in batch.rows if self._sources else ():
            lengths = self._rows.row(number).lengths
            first = self._first_documents[number]
            ids = self._sources.of_documents[first : first + len(lengths)] if self._sources else 0
            source_ids[start : start + size] = np.repeat(ids, lengths)
            start += size
        return torch.from_numpy(source_ids)


def perplexity(loss: float) -> float:
    """exp(loss), or infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class PreferenceMetrics:
    """The training loss and its metrics on held-out completions."""

    def __init__(self, preferences: Preferences, references: RefModel | None) -> None:
        self._preferences, self._references = preferences, references
        self._seen: list[CompletionLogProbs] = []

    @property
    def names(self) -> list[str]:
        # KTO has unpaired completions, so there is no preference accuracy.
        left_out = {ACCURACY} if self._preferences.config.loss_type == "kto" else set[str]()
        names = ("loss", *NAMES, MARGINS)
        return [f"{PREFIX}{name}" for name in names if name not in left_out]

    def reset(self) -> None:
        self._seen = []

    def update(self, batches: Sequence[MicroBatch]) -> None:
        references = self._references.lookup(batches) if self._references else ()
        self._seen += self._preferences.forward_only(batches, references)

    def compute(self) -> dict[str, float]:
        loss, metrics = self._preferences.compute_loss(self._seen)
        return {
            f"{PREFIX}loss": loss,
            **{f"{PREFIX}{name}": value for name, value in metrics.items()},
        }
