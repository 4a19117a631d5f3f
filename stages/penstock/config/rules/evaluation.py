"""Invalid combinations of evaluation settings."""

from collections.abc import Iterator

from penstock.config.loading.fault import ConfigIssue, Steps
from penstock.config.rules.data import Issues
from penstock.config.schema.run import RunConfig

METRICS = ("eval_loss", "eval_perplexity", "eval_token_accuracy")
"""Metrics of every evaluation; with several data sets also `eval_loss/<name>`."""

PREFERENCE_METRICS = (
    "eval_loss",
    *(f"eval_rewards/{name}" for name in ("margins", "chosen", "rejected")),
)
"""Metrics of preference training."""

PAIR_METRICS = (*PREFERENCE_METRICS, "eval_rewards/accuracies")
"""Metrics of preference training on pairs."""


def unknown_metric(metric: str, run: RunConfig) -> str | None:
    """The error message for a metric that no evaluation has; None for a known one."""
    if run.train.objective == "preference":
        known = PREFERENCE_METRICS if run.preference.loss_type == "kto" else PAIR_METRICS
        if metric in known:
            return None
        return f"{metric} is not a metric of preference evaluations; write {', '.join(known)}"
    if metric in METRICS or metric.startswith("eval_loss/"):
        return None
    return (
        f"{metric} is not a metric of evaluations; write {', '.join(METRICS)}, or eval_loss/ and"
        " the name of a data set"
    )


def _iter_metrics(run: RunConfig) -> Iterator[tuple[Steps, str]]:
    """The settings that use a metric, and their metrics."""
    train = run.train
    if train.early_stopping.patience:
        yield ("train", "early_stopping", "patience"), train.early_stopping.metric
    if train.save_best.metric:
        yield ("train", "save_best", "metric"), train.save_best.metric


def _check_held_out_data(run: RunConfig) -> Issues:
    data, train = run.data, run.train
    # Prepared data may have a validation split, which is known only when it is read.
    if data.test_datasets or data.val_set_size or data.skip_prepare_dataset:
        return
    options = ("eval_steps", "eval_epochs", "eval_at_start", "eval_sanity_batches", "eval_only")
    found: list[Steps] = [
        ("train", name)
        for name in (*options, "eval_max_batches", "eval_rows_per_batch", "eval_micro_batch_size")
        if getattr(train, name)
    ]
    for path in (*found, *(path for path, _ in _iter_metrics(run))):
        yield ConfigIssue(
            path,
            "there is nothing to evaluate on; write data.val_set_size or data.test_datasets, or"
            f" leave {path[-1]} out",
            ("data.val_set_size", "data.test_datasets"),
        )


def _check_rows_per_batch(run: RunConfig) -> Issues:
    train = run.train
    counts = isinstance(train.eval_max_batches, int) or train.eval_sanity_batches
    if train.eval_rows_per_batch is not None and not counts:
        yield ConfigIssue(
            ("train", "eval_rows_per_batch"),
            "there is no number of batches; write eval_max_batches as a whole number, or leave"
            " eval_rows_per_batch out",
            ("train.eval_max_batches", "train.eval_sanity_batches"),
        )


def _check_eval_interval(run: RunConfig) -> Issues:
    train = run.train
    for path, metric in _iter_metrics(run):
        if why := unknown_metric(metric, run):
            yield ConfigIssue((*path[:-1], "metric"), why)
        if not train.eval_steps and not train.eval_epochs:
            yield ConfigIssue(
                path,
                "there is no evaluation during training; write train.eval_steps or"
                f" train.eval_epochs, or leave {path[1]} out",
                ("train.eval_steps", "train.eval_epochs"),
            )
        if train.eval_max_batches == 0:
            yield ConfigIssue(
                ("train", "eval_max_batches"),
                f"0 evaluates nothing, and {path[1]} needs evaluations; leave one of them out",
                (f"train.{path[1]}.{path[2]}",),
            )


def _check_metric_options(run: RunConfig) -> Issues:
    train = run.train
    if train.save_best.mode and not train.save_best.metric:
        yield ConfigIssue(
            ("train", "save_best", "mode"),
            f"is {train.save_best.mode}, but no metric is set; write metric, or leave mode out",
            ("train.save_best.metric",),
        )


def _check_eval_only(run: RunConfig) -> Issues:
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
    for path, _ in _iter_metrics(run):
        yield ConfigIssue(
            path,
            f"has no effect with eval_only: true; leave {path[1]} out",
            ("train.eval_only",),
        )


def _check_sample_prompts(run: RunConfig) -> Issues:
    train = run.train
    for index, prompt in enumerate(train.sample_prompts):
        if not prompt.strip():
            yield ConfigIssue(("train", "sample_prompts", index), "is empty; write a prompt")


EVALUATION_RULES = (
    _check_held_out_data,
    _check_rows_per_batch,
    _check_eval_interval,
    _check_metric_options,
    _check_eval_only,
    _check_sample_prompts,
)
