"""When a run ends."""

from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Keyed, KeyedIfEvaluated, KeyedUnlessDefault


def _some_epochs(value: float) -> int | float:
    """A whole number as one, so that `3` and `3.0` are the same run."""
    if value <= 0:
        raise ValueError(f"is {value:g}; write a number above 0, for example 3 or 0.5")
    return int(value) if value == int(value) else value


class EarlyStoppingConfig(ConfigSection):
    """Ending a run when evaluations no longer get better."""

    metric: str = Field(default="eval_loss", min_length=1)
    """What is watched: a name in the records of evaluations. Of a `token_accuracy` more is better,
    of all else less."""

    patience: int = Field(default=0, ge=0)
    """The run ends with so many evaluations in a row that are no better than the best before them.
    0: it does not end by evaluations. Needs `eval_steps` or `eval_epochs`."""

    min_delta: float = Field(default=0.0, ge=0)
    """How much better than the best one has to be to count as better."""


class BudgetConfig(ConfigSection):
    """The length of a run. `max_steps` and `max_tokens` stand in place of `num_train_epochs`, and
    whichever comes first ends the run; `max_hours` and `early_stopping` may end it sooner."""

    num_train_epochs: Keyed[Annotated[int | float, AfterValidator(_some_epochs)]] = 1
    """Passes over the data; fractions allowed (0.5: the first half of the order of one epoch). Not
    asked where `max_steps` or `max_tokens` is written."""

    max_steps: Keyed[int | None] = Field(default=None, gt=0)
    """Optimizer steps after which training ends, whatever `num_train_epochs` says; the learning
    rate's schedule ends there too."""

    max_tokens: KeyedUnlessDefault[int | None] = Field(default=None, gt=0)
    """Tokens after which training ends, with the step that reaches them: all that the model reads,
    trained or not, without padding. The learning rate's schedule ends there too."""

    max_hours: KeyedUnlessDefault[float | None] = Field(default=None, gt=0)
    """Hours after which the run saves, evaluates and ends. Counted over all its starts: training,
    evaluating and saving, but not loading. The learning rate's schedule does not know of it."""

    early_stopping: KeyedIfEvaluated[EarlyStoppingConfig] = Field(
        default_factory=EarlyStoppingConfig
    )
    """Ending the run when evaluations no longer get better."""
