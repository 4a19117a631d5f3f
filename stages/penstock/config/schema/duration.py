"""When a run ends: epochs, steps, tokens, hours, early stopping."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Keyed, KeyedIfEvaluated, KeyedUnlessDefault
from penstock.config.schema.effect import TRAINS, OnlyWith
from penstock.config.schema.evaluation import EVALUATED

# Upper limits of the length of a run.
MOST_EPOCHS, MOST_STEPS = 1_000_000, 1_000_000_000


def _check_epochs(value: float) -> int | float:
    # A whole number becomes an int, so that `3` and `3.0` have the same cache key.
    if value <= 0:
        raise ValueError(f"is {value:g}; write a number above 0, for example 3 or 0.5")
    if value > MOST_EPOCHS:
        raise ValueError(f"is {value:g}; it must be at most {MOST_EPOCHS:,}")
    return int(value) if value == int(value) else value


STOPS = OnlyWith(
    "train.early_stopping.is_on", words="patience", why="patience: 0 disables early stopping"
)


class EarlyStoppingConfig(ConfigSection):
    """Early stopping: end the run when an evaluation metric no longer improves."""

    metric: Annotated[str, STOPS] = Field(default="eval_loss", min_length=1)
    """The metric: a name in the records of evaluations. Higher is better for accuracies, for
    rewards and log-probs of `chosen` and for margins; lower is better for all others."""

    patience: Annotated[int, *EVALUATED] = Field(default=0, ge=0)
    """Number of evaluations in a row without improvement after which the run ends. 0: no early
    stopping. Needs `eval_steps` or `eval_epochs`."""

    min_delta: Annotated[float, STOPS] = Field(default=0.0, ge=0)
    """Smallest improvement over the best value that counts as an improvement."""

    @property
    def is_on(self) -> bool:
        return self.patience > 0


class BudgetConfig(ConfigSection):
    """The length of a run. `max_steps` and `max_tokens` replace `num_train_epochs`; with both, the
    first that is reached ends the run. `max_hours` and `early_stopping` may end it earlier."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (TRAINS,)

    num_train_epochs: Annotated[
        Keyed[Annotated[int | float, AfterValidator(_check_epochs)]],
        OnlyWith("train.ends_by_epochs", words="neither max_steps nor max_tokens", unmet="silent"),
    ] = 1
    """Epochs: passes over the data. Fractions are allowed (0.5: the first half of the order of one
    epoch). Ignored where `max_steps` or `max_tokens` is set."""

    max_steps: Keyed[int | None] = Field(default=None, gt=0, le=MOST_STEPS)
    """Number of optimizer steps after which training ends, whatever `num_train_epochs` is; the
    learning rate schedule ends there too."""

    max_tokens: KeyedUnlessDefault[int | None] = Field(default=None, gt=0)
    """Number of tokens after which training ends, with the step that reaches it. All tokens that
    the model reads count, trained or not, without padding. The learning rate schedule ends there
    too."""

    max_hours: KeyedUnlessDefault[float | None] = Field(default=None, gt=0)
    """Hours after which the run saves, evaluates and ends. Training, evaluation and saving count,
    over all starts of the run; loading does not. The learning rate schedule ignores it."""

    early_stopping: KeyedIfEvaluated[EarlyStoppingConfig] = Field(
        default_factory=EarlyStoppingConfig
    )
    """End the run when evaluations no longer improve."""

    @property
    def ends_by_epochs(self) -> bool:
        return self.max_steps is None and self.max_tokens is None
