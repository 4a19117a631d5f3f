"""Evaluation during training: when, on how much data, and sample generations."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection, require
from penstock.config.schema.cache_key import KeyedIfEvaluated, KeyedUnlessDefault, Unkeyed
from penstock.config.schema.effect import NotWith, OnlyWith
from penstock.config.schema.registered import Registered
from penstock.core.extensions import METRICS


def metric_sign(metric: str, mode: Literal["min", "max"] | None = None) -> int:
    """1 if higher is better, -1 if lower is better. Without `mode`, higher is better for accuracies
    and for rewards and log-probs, except those of rejected completions."""
    # In `accuracy` as in `accuracies`.
    more = "accurac" in metric or metric.startswith(("eval_rewards/", "eval_logps/"))
    usual = "max" if more and not metric.endswith("/rejected") else "min"
    return 1 if (mode or usual) == "max" else -1


PROMPTED = OnlyWith("train.has_prompts", words="sample_prompts", why="there are no prompts")


EVALUATES = OnlyWith(
    "data.has_held_out_data",
    words="data.val_set_size or data.test_datasets",
    why="there is nothing to evaluate on",
    reads=("data.val_set_size", "data.test_datasets"),
)

# The conditions of what evaluations during training decide.
EVALUATED = (
    EVALUATES,
    OnlyWith(
        "train.evaluates_in_training",
        words="train.eval_steps or train.eval_epochs",
        why="there is no evaluation during training",
        reads=("train.eval_steps", "train.eval_epochs"),
    ),
    NotWith(
        "train.eval_only", why="has no effect with eval_only: true", instead="leave {field} out"
    ),
)


def _not_nothing(setting: str, none: object) -> NotWith:
    section = setting.split(".")[1]
    why = f"0 evaluates nothing, and {section} needs evaluations"
    return NotWith(setting, unless=(none,), of=(0,), why=why, instead="leave one of them out")


class EvaluationConfig(ConfigSection):
    """Evaluation on held-out data (`data.test_datasets`, `data.val_set_size`), and sample
    generations."""

    eval_steps: Annotated[KeyedIfEvaluated[int], EVALUATES] = Field(default=0, ge=0)
    """Evaluate every `eval_steps` optimizer steps; 0: not by steps."""

    eval_epochs: Annotated[KeyedIfEvaluated[float], EVALUATES] = Field(default=0.0, ge=0)
    """Evaluate every `eval_epochs` epochs; fractions are allowed; 0: not by epochs."""

    eval_at_start: Annotated[Unkeyed[bool], EVALUATES] = False
    """Evaluate before the first step too."""

    eval_at_end: KeyedIfEvaluated[bool] = True
    """Evaluate after the last step, if there is held-out data."""

    eval_sanity_batches: Annotated[Unkeyed[int], EVALUATES] = Field(default=0, ge=0)
    """Sanity check: each time the run starts, evaluate on this many batches of the most expensive
    sequences before the first step, so that an error in evaluation ends the run now and not hours
    later. Results are not logged. Skipped where the run evaluates before that step anyway. 0: no
    check."""

    eval_max_batches: Annotated[
        KeyedIfEvaluated[int | float | None],
        require(
            lambda batches: batches >= 0 and (isinstance(batches, int) or batches <= 1),
            "is {value}; write a whole number of batches (10), or a fraction up to 1.0 (0.25)",
        ),
        replace(EVALUATES, spares=(0,)),
        _not_nothing("train.early_stopping.patience", none=0),
        _not_nothing("train.save_best.metric", none=None),
    ] = None
    """How much of the held-out data to evaluate on: a number of batches (`eval_rows_per_batch`), or
    a fraction of all sequences, up to 1.0; always the same sequences. 0: no evaluation. Unset:
    all."""

    eval_rows_per_batch: Annotated[
        KeyedIfEvaluated[int | None],
        EVALUATES,
        OnlyWith(
            "train.counts_eval_batches",
            words="eval_max_batches as a whole number",
            why="there is no number of batches",
            reads=("train.eval_max_batches", "train.eval_sanity_batches"),
        ),
    ] = Field(default=None, gt=0)
    """Sequences of a batch in `eval_max_batches` and `eval_sanity_batches`. Unset: as many as a
    training step has."""

    eval_micro_batch_size: Annotated[Unkeyed[int | None], EVALUATES] = Field(default=None, gt=0)
    """Sequences that one rank evaluates at once. Unset: `micro_batch_size`."""

    eval_metrics: Annotated[
        KeyedIfEvaluated[
            dict[
                Annotated[str, Registered(METRICS, "is always reported; leave {name} out")],
                dict[str, Any],
            ]
        ],
        EVALUATES,
        NotWith(
            "train.objective",
            ("preference",),
            why="are means over tokens, and train.objective is {value}",
            instead="leave {field} out",
        ),
    ] = Field(default_factory=dict[str, dict[str, Any]])
    """Further metrics, of installed packages, by name, each with its options: `{entropy: {}}`.
    Reported as `eval_<name>`."""

    eval_only: Annotated[KeyedUnlessDefault[bool], EVALUATES] = False
    """Evaluate the model that training would start from; train and export nothing. Settings of the
    optimizer, the loss and the length of a run are then in no cache key."""

    sample_prompts: Unkeyed[
        list[Annotated[str, require(str.strip, "is empty; write a prompt")]]
    ] = Field(default_factory=list[str])
    """Prompts for which the model generates completions during training, with greedy decoding: as a
    user message if the tokenizer has a chat template, else as text to continue. The completions are
    in `samples.jsonl` and in the report."""

    sample_steps: Annotated[Unkeyed[int], PROMPTED] = Field(default=0, ge=0)
    """Generate completions every `sample_steps` optimizer steps; also after the last step. 0: only
    then."""

    sample_max_new_tokens: Annotated[Unkeyed[int], PROMPTED] = Field(default=64, gt=0)
    """Maximum number of generated tokens of a completion."""

    @property
    def evaluates_in_training(self) -> bool:
        return self.eval_steps > 0 or self.eval_epochs > 0

    @property
    def counts_eval_batches(self) -> bool:
        """Whether a setting is a number of batches."""
        return isinstance(self.eval_max_batches, int) or self.eval_sanity_batches > 0

    @property
    def counts_batches(self) -> bool:
        """Whether a number of batches is evaluated on, so that their size matters."""
        return isinstance(self.eval_max_batches, int)

    @property
    def has_prompts(self) -> bool:
        return bool(self.sample_prompts)
