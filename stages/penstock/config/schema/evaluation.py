"""What is measured of a model while it is trained, and when."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import KeyedIfEvaluated, KeyedUnlessDefault, Unkeyed


def _batches_or_share(value: int | float | None) -> int | float | None:
    if value is None:
        return None
    if value < 0 or (isinstance(value, float) and value > 1):
        raise ValueError(
            f"is {value}; write a whole number of batches (10), or a share up to 1.0 (0.25)"
        )
    return value


def metric_sign(metric: str, mode: Literal["min", "max"] | None = None) -> int:
    """What makes more of a metric better, 1 or -1; where nobody says it, more of an accuracy or of
    a reward is, but less of what is rejected."""
    more = "accurac" in metric or metric.startswith(("eval_rewards/", "eval_logps/"))
    usual = "max" if more and not metric.endswith("/rejected") else "min"
    return 1 if (mode or usual) == "max" else -1


class EvaluationConfig(ConfigSection):
    """Loss on held-out rows (`data.test_datasets`, `data.val_set_size`), and answers to prompts."""

    eval_steps: KeyedIfEvaluated[int] = Field(default=0, ge=0)
    """Evaluate every so many optimizer steps; 0 does not by steps."""

    eval_epochs: KeyedIfEvaluated[float] = Field(default=0.0, ge=0)
    """Evaluate every so many epochs; fractions allowed, 0 does not by epochs."""

    eval_at_start: Unkeyed[bool] = False
    """Evaluate before the first step too."""

    eval_at_end: KeyedIfEvaluated[bool] = True
    """Evaluate after the last step, where anything is held out."""

    eval_sanity_batches: Unkeyed[int] = Field(default=0, ge=0)
    """Before its first step, a start of a run that does not evaluate then anyway tries evaluating
    on so many batches, of the rows that cost most: what is wrong with evaluations ends the run now
    and not hours later. The numbers are no evaluation, and are not told. 0: none."""

    eval_max_batches: KeyedIfEvaluated[
        Annotated[int | float | None, AfterValidator(_batches_or_share)]
    ] = None
    """How much of what is held out is evaluated on: so many batches (see `eval_rows_per_batch`), or
    the share of all rows, up to 1.0; always the same rows. 0: none, so no evaluation. Unset:
    all."""

    eval_rows_per_batch: KeyedIfEvaluated[int | None] = Field(default=None, gt=0)
    """Rows of one batch that `eval_max_batches` and `eval_sanity_batches` count. Unset: as many as
    a training step has."""

    eval_micro_batch_size: Unkeyed[int | None] = Field(default=None, gt=0)
    """Rows that one rank evaluates at once. Unset: `micro_batch_size`."""

    eval_only: KeyedUnlessDefault[bool] = False
    """Evaluate the model that training would start from, and train nothing. Nothing is exported."""

    sample_prompts: Unkeyed[list[str]] = Field(default_factory=list[str])
    """Prompts that the model answers while it is trained, each time with the likeliest tokens: as a
    user's message where the tokenizer has a chat template, else as text to go on with. Answers are
    in `samples.jsonl` and in the report."""

    sample_steps: Unkeyed[int] = Field(default=0, ge=0)
    """Answer them every so many optimizer steps; after the last step in any case."""

    sample_max_new_tokens: Unkeyed[int] = Field(default=64, gt=0)
    """Tokens of an answer, at most."""
