"""What an evaluation tells of answers: the loss, and which of them are preferred."""

from collections.abc import Sequence

from penstock.engine.losses.preference import AnswerLogProbs, Preferences
from penstock.losses.preference_metrics import MARGINS, NAMES, RIGHT
from penstock.rows.collate import MicroBatch
from penstock.train.eval.reference_model import References

PREFIX = "eval_"


class PreferenceMetrics:
    """The loss that is trained on, and its measures, of answers that are held out."""

    def __init__(self, preferences: Preferences, references: References | None) -> None:
        self._preferences, self._references = preferences, references
        self._seen: list[AnswerLogProbs] = []

    @property
    def names(self) -> list[str]:
        """What `record` tells."""
        # There is nothing to be right about in answers that are judged one by one.
        left_out = {RIGHT} if self._preferences.how.loss_type == "kto" else set[str]()
        names = ("loss", *NAMES, MARGINS)
        return [f"{PREFIX}{name}" for name in names if name not in left_out]

    def begin(self) -> None:
        """Forget what has been seen."""
        self._seen = []

    def see(self, batches: Sequence[MicroBatch]) -> None:
        """Look at this rank's micro-batches."""
        references = self._references.of(batches) if self._references else ()
        self._seen += self._preferences.look(batches, references)

    def record(self) -> dict[str, float]:
        """What there is to tell of all that all ranks have seen."""
        loss, found = self._preferences.conclude(self._seen)
        return {
            f"{PREFIX}loss": loss,
            **{f"{PREFIX}{name}": value for name, value in found.items()},
        }
