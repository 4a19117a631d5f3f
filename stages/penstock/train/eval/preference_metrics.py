"""Preference evaluation metrics: the loss and the preference accuracy."""

from collections.abc import Sequence

from penstock.engine.losses.preference import CompletionLogProbs, Preferences
from penstock.losses.preference_metrics import ACCURACY, MARGINS, NAMES
from penstock.rows.collate import MicroBatch
from penstock.train.eval.reference_model import RefModel

PREFIX = "eval_"


class PreferenceMetrics:
    """The training loss and its metrics on held-out completions."""

    def __init__(self, preferences: Preferences, references: RefModel | None) -> None:
        self._preferences, self._references = preferences, references
        self._seen: list[CompletionLogProbs] = []

    @property
    def names(self) -> list[str]:
        """The keys of `record`."""
        # KTO has unpaired completions, so there is no preference accuracy.
        left_out = {ACCURACY} if self._preferences.config.loss_type == "kto" else set[str]()
        names = ("loss", *NAMES, MARGINS)
        return [f"{PREFIX}{name}" for name in names if name not in left_out]

    def reset(self) -> None:
        """Reset the accumulated values."""
        self._seen = []

    def update(self, batches: Sequence[MicroBatch]) -> None:
        """Accumulate over this rank's micro-batches."""
        references = self._references.lookup(batches) if self._references else ()
        self._seen += self._preferences.forward_only(batches, references)

    def compute(self) -> dict[str, float]:
        """Reduce over all ranks and return the metrics."""
        loss, metrics = self._preferences.compute_loss(self._seen)
        return {
            f"{PREFIX}loss": loss,
            **{f"{PREFIX}{name}": value for name, value in metrics.items()},
        }
