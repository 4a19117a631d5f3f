"""Evaluation during training: when, on how much data, and sample generations."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import KeyedIfEvaluated, KeyedUnlessDefault, Unkeyed
from penstock.config.schema.effect import OnlyWith


def _check_max_batches(value: int | float | None) -> int | float | None:
    if value is None:
        return None
    if value < 0 or (isinstance(value, float) and value > 1):
        raise ValueError(
            f"is {value}; write a whole number of batches (10), or a fraction up to 1.0 (0.25)"
        )
    return value


def metric_sign(metric: str, mode: Literal["min", "max"] | None = None) -> int:
    """1 if higher is better, -1 if lower is better. Without `mode`, higher is better for accuracies
    and for rewards and log-probs, except those of rejected completions."""
    more = "accurac" in metric or metric.startswith(("eval_rewards/", "eval_logps/"))
    usual = "max" if more and not metric.endswith("/rejected") else "min"
    return 1 if (mode or usual) == "max" else -1


PROMPTED = OnlyWith("train.has_prompts", words="sample_prompts", why="there are no prompts")


class EvaluationConfig(ConfigSection):
    """Evaluation on held-out data (`data.test_datasets`, `data.val_set_size`), and sample
    generations."""

    eval_steps: KeyedIfEvaluated[int] = Field(default=0, ge=0)
    """Evaluate every `eval_steps` optimizer steps; 0: not by steps."""

    eval_epochs: KeyedIfEvaluated[float] = Field(default=0.0, ge=0)
    """Evaluate every `eval_epochs` epochs; fractions are allowed; 0: not by epochs."""

    eval_at_start: Unkeyed[bool] = False
    """Evaluate before the first step too."""

    eval_at_end: KeyedIfEvaluated[bool] = True
    """Evaluate after the last step, if there is held-out data."""

    eval_sanity_batches: Unkeyed[int] = Field(default=0, ge=0)
    """Sanity check: each time the run starts, evaluate on this many batches of the most expensive
    sequences before the first step, so that an error in evaluation ends the run now and not hours
    later. Results are not logged. Skipped where the run evaluates before that step anyway. 0: no
    check."""

    eval_max_batches: KeyedIfEvaluated[
        Annotated[int | float | None, AfterValidator(_check_max_batches)]
    ] = None
    """How much of the held-out data to evaluate on: a number of batches (`eval_rows_per_batch`), or
    a fraction of all sequences, up to 1.0; always the same sequences. 0: no evaluation. Unset:
    all."""

    eval_rows_per_batch: KeyedIfEvaluated[int | None] = Field(default=None, gt=0)
    """Sequences of a batch in `eval_max_batches` and `eval_sanity_batches`. Unset: as many as a
    training step has."""

    eval_micro_batch_size: Unkeyed[int | None] = Field(default=None, gt=0)
    """Sequences that one rank evaluates at once. Unset: `micro_batch_size`."""

    eval_only: KeyedUnlessDefault[bool] = False
    """Evaluate the model that training would start from; train and export nothing. Settings of the
    optimizer, the loss and the length of a run are then in no cache key."""

    sample_prompts: Unkeyed[list[str]] = Field(default_factory=list[str])
    """Prompts for which the model generates completions during training, with greedy decoding: as a
    user message if the tokenizer has a chat template, else as text to continue. The completions are
    in `samples.jsonl` and in the report."""

    sample_steps: Annotated[Unkeyed[int], PROMPTED] = Field(default=0, ge=0)
    """Generate completions every `sample_steps` optimizer steps; also after the last step. 0: only
    then."""

    sample_max_new_tokens: Annotated[Unkeyed[int], PROMPTED] = Field(default=64, gt=0)
    """Maximum number of generated tokens of a completion."""

    @property
    def has_prompts(self) -> bool:
        """Whether completions are generated."""
        return bool(self.sample_prompts)
