"""Training duration: max_steps, max_tokens, epochs, and max_hours by the clock."""

import time
from dataclasses import dataclass
from fractions import Fraction

from penstock.config.schema.train import TrainConfig
from penstock.rows.batches import Integers, StepSampler
from penstock.train.checkpointing import TrainerState


@dataclass(frozen=True)
class Duration:
    """The length of a run, known before its first step. The learning rate schedule uses it."""

    total_steps: int
    """Optimizer steps of the whole run, including completed ones."""
    set_by: str
    """The setting that determines it."""


def build_duration(
    train: TrainConfig, batches: StepSampler, tokens: Integers, state: TrainerState
) -> Duration:
    """Compute the duration of a run resumed at `state`; `tokens` are the token counts of every row.

    `max_steps` and `max_tokens` apply if set, whichever is reached first; otherwise the remaining
    epochs. Exact, because the rows and their order are known.
    """
    if train.eval_only:
        return Duration(state.step, "eval_only")
    ends: dict[str, int] = {}
    if train.max_steps is not None:
        ends["max_steps"] = train.max_steps
    if train.max_tokens is not None:
        remaining = train.max_tokens - state.tokens
        most = None if train.max_steps is None else max(0, train.max_steps - state.step)
        steps = batches.steps_to_reach(remaining, tokens, state.cursor, most=most)
        ends["max_tokens"] = state.step + steps
    if not ends:
        epochs = Fraction(str(train.num_train_epochs))
        ends["num_train_epochs"] = state.step + batches.steps_until(epochs, state.cursor)
    first = min(ends, key=lambda name: ends[name])
    return Duration(ends[first], first)


class WallClock:
    """Wall-clock time of a run over all its restarts, and the `max_hours` limit."""

    def __init__(self, max_hours: float | None) -> None:
        """Start the clock; None is unlimited."""
        self._limit = max_hours and max_hours * 3600
        self._before = 0.0
        self._started = time.monotonic()

    def resume_from(self, seconds: float) -> None:
        """Add the time of earlier starts."""
        self._before = seconds

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    @property
    def is_up(self) -> bool:
        return self._limit is not None and self.seconds >= self._limit
