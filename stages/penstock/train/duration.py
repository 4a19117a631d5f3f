"""How long a run is, and what is due on the way."""

import time
from dataclasses import dataclass
from fractions import Fraction

from penstock.config.schema.train import TrainConfig
from penstock.rows.batches import Integers, StepSampler
from penstock.train.checkpointing import TrainerState


@dataclass(frozen=True)
class Duration:
    """The length of a run as it is known before its first step; the learning rate follows it."""

    total_steps: int
    """Optimizer steps of the whole run, those that are done included."""
    set_by: str
    """The setting that says so."""


def build_duration(
    train: TrainConfig, batches: StepSampler, tokens: Integers, at: TrainerState
) -> Duration:
    """What the settings say of a run that is at `at`; `tokens` are those of every row.

    `max_steps` and `max_tokens` decide where they are written, whichever comes first; else what is
    left of the epochs. Exact: rows and their order are known.
    """
    if train.eval_only:
        return Duration(at.step, "eval_only")
    ends: dict[str, int] = {}
    if train.max_steps is not None:
        ends["max_steps"] = train.max_steps
    if train.max_tokens is not None:
        left = train.max_tokens - at.tokens
        most = None if train.max_steps is None else max(0, train.max_steps - at.step)
        steps = batches.steps_to_reach(left, tokens, at.cursor, most=most)
        ends["max_tokens"] = at.step + steps
    if not ends:
        epochs = Fraction(str(train.num_train_epochs))
        ends["num_train_epochs"] = at.step + batches.steps_until(epochs, at.cursor)
    first = min(ends, key=lambda name: ends[name])
    return Duration(ends[first], first)


@dataclass(frozen=True)
class Interval:
    """Every so many steps, every so many epochs, or both; 0: not by these."""

    steps: int = 0
    epochs: float = 0.0

    def is_due(self, step: int, before: Fraction, now: Fraction) -> bool:
        """Whether it is after this step, with which the epochs that are done went from `before` to
        `now`."""
        if self.steps and step % self.steps == 0:
            return True
        if not self.epochs:
            return False
        interval = Fraction(str(self.epochs))
        return now // interval > before // interval


class WallClock:
    """How long a run has taken, all its starts together, and whether that is enough."""

    def __init__(self, max_hours: float | None) -> None:
        """Start it; without a limit it is never enough."""
        self._limit = max_hours and max_hours * 3600
        self._before = 0.0
        self._started = time.monotonic()

    def go_on_from(self, seconds: float) -> None:
        """Count those of earlier starts too."""
        self._before = seconds

    @property
    def seconds(self) -> float:
        """Of the run so far."""
        return self._before + time.monotonic() - self._started

    @property
    def is_up(self) -> bool:
        """Whether the run has had its time."""
        return self._limit is not None and self.seconds >= self._limit
