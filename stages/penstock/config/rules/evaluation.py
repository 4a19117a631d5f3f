"""Combinations of settings of evaluating that cannot be honoured."""

from collections.abc import Iterator

from penstock.config.loading.fault import ConfigIssue, Steps
from penstock.config.rules.data import Faults
from penstock.config.schema.run import RunConfig

TOLD = ("eval_loss", "eval_perplexity", "eval_token_accuracy")
"""What every evaluation tells; of several data sets also `eval_loss/<its name>`."""


TOLD_OF_ANSWERS = (
    "eval_loss",
    *(f"eval_rewards/{name}" for name in ("margins", "chosen", "rejected")),
)
"""What evaluations tell where preferences are learnt."""

TOLD_OF_PAIRS = (*TOLD_OF_ANSWERS, "eval_rewards/accuracies")
"""The same where answers come in pairs."""


def untold(metric: str, run: RunConfig) -> str | None:
    """What is to be said of a metric that no evaluation tells."""
    if run.train.objective == "preference":
        told = TOLD_OF_ANSWERS if run.preference.loss_type == "kto" else TOLD_OF_PAIRS
        if metric in told:
            return None
        return f"no evaluation of answers tells {metric}; write {', '.join(told)}"
    if metric in TOLD or metric.startswith("eval_loss/"):
        return None
    return (
        f"no evaluation tells {metric}; write {', '.join(TOLD)}, or eval_loss/ and the name of a"
        " data set"
    )


def _judged_by(run: RunConfig) -> Iterator[tuple[Steps, str]]:
    """The settings by which a run is judged, and their metrics."""
    train = run.train
    if train.early_stopping.patience:
        yield ("train", "early_stopping", "patience"), train.early_stopping.metric
    if train.save_best.metric:
        yield ("train", "save_best", "metric"), train.save_best.metric


def _something_is_held_out(run: RunConfig) -> Faults:
    data, train = run.data, run.train
    # Data that is prepared already may hold some out; that is found when it is read.
    if data.test_datasets or data.val_set_size or data.skip_prepare_dataset:
        return
    wishes = ("eval_steps", "eval_epochs", "eval_at_start", "eval_sanity_batches", "eval_only")
    found: list[Steps] = [
        ("train", name)
        for name in (*wishes, "eval_max_batches", "eval_rows_per_batch", "eval_micro_batch_size")
        if getattr(train, name)
    ]
    for path in (*found, *(path for path, _ in _judged_by(run))):
        yield ConfigIssue(
            path,
            "there is nothing to evaluate on; write data.val_set_size or data.test_datasets, or"
            f" leave {path[-1]} out",
            ("data.val_set_size", "data.test_datasets"),
        )


def _batches_are_counted(run: RunConfig) -> Faults:
    train = run.train
    counts = isinstance(train.eval_max_batches, int) or train.eval_sanity_batches
    if train.eval_rows_per_batch is not None and not counts:
        yield ConfigIssue(
            ("train", "eval_rows_per_batch"),
            "no batches are counted; write eval_max_batches as a whole number, or leave"
            " eval_rows_per_batch out",
            ("train.eval_max_batches", "train.eval_sanity_batches"),
        )


def _runs_are_judged_on_the_way(run: RunConfig) -> Faults:
    train = run.train
    for path, metric in _judged_by(run):
        if why := untold(metric, run):
            yield ConfigIssue((*path[:-1], "metric"), why)
        if not train.eval_steps and not train.eval_epochs:
            yield ConfigIssue(
                path,
                "nothing is evaluated on the way; write train.eval_steps or train.eval_epochs, or"
                f" leave {path[1]} out",
                ("train.eval_steps", "train.eval_epochs"),
            )
        if train.eval_max_batches == 0:
            yield ConfigIssue(
                ("train", "eval_max_batches"),
                f"0 evaluates nothing, and {path[1]} asks for evaluations; leave one of them out",
                (f"train.{path[1]}.{path[2]}",),
            )


def _judging_is_on(run: RunConfig) -> Faults:
    train = run.train
    if not train.early_stopping.patience:
        for name in ("metric", "min_delta"):
            if train.early_stopping.asks_for(name):
                yield ConfigIssue(
                    ("train", "early_stopping", name),
                    f"nothing ends the run with patience: 0; write patience, or leave {name} out",
                    ("train.early_stopping.patience",),
                )
    if train.save_best.mode and not train.save_best.metric:
        yield ConfigIssue(
            ("train", "save_best", "mode"),
            f"{train.save_best.mode} of what? Write metric, or leave mode out",
            ("train.save_best.metric",),
        )


def _what_only_evaluates_ends_there(run: RunConfig) -> Faults:
    train = run.train
    if not train.eval_only:
        return
    later = [stage for stage in ("export", "push") if stage in (run.pipeline.stages or ())]
    if later:
        yield ConfigIssue(
            ("train", "eval_only"),
            f"trains nothing, so there is nothing for {' and '.join(later)}; leave"
            f" {' and '.join(later)} out of pipeline.stages",
            ("pipeline.stages",),
        )
    for path, _ in _judged_by(run):
        yield ConfigIssue(
            path,
            f"there is nothing to judge with eval_only: true; leave {path[1]} out",
            ("train.eval_only",),
        )


def _prompts_are_there(run: RunConfig) -> Faults:
    train = run.train
    for name in ("sample_steps", "sample_max_new_tokens"):
        if not train.sample_prompts and train.asks_for(name):
            yield ConfigIssue(
                ("train", name),
                f"there is no prompt to answer; write sample_prompts, or leave {name} out",
                ("train.sample_prompts",),
            )
    for index, prompt in enumerate(train.sample_prompts):
        if not prompt.strip():
            yield ConfigIssue(("train", "sample_prompts", index), "is empty; write a prompt")


EVALUATION_RULES = (
    _something_is_held_out,
    _batches_are_counted,
    _runs_are_judged_on_the_way,
    _judging_is_on,
    _what_only_evaluates_ends_there,
    _prompts_are_there,
)
