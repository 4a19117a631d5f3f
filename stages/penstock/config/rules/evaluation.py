"""Metrics that no evaluation has, and what a release needs."""

from penstock.config.loading.fault import ConfigIssue, Issues, Steps
from penstock.config.schema.pipeline import DEFAULT_STAGES
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


def _unknown_metric(metric: str, run: RunConfig) -> str | None:
    """The error message for a metric that no evaluation has; None for a known one."""
    if run.train.objective == "preference":
        metrics = PREFERENCE_METRICS if run.preference.loss_type == "kto" else PAIR_METRICS
        if metric in metrics:
            return None
        return f"{metric} is not a metric of preference evaluations; write {', '.join(metrics)}"
    metrics = (*METRICS, *(f"eval_{name}" for name in run.train.eval_metrics))
    if metric in metrics or metric.startswith("eval_loss/"):
        return None
    return (
        f"{metric} is not a metric of evaluations; write {', '.join(metrics)}, or eval_loss/ and"
        " the name of a data set"
    )


def _check_metrics(run: RunConfig) -> Issues:
    train, release = run.train, run.release
    metrics: dict[Steps, str | None] = {
        ("train", "save_best", "metric"): train.save_best.metric,
        ("release", "metric"): release.metric if release.name else None,
    }
    if train.early_stopping.is_on:
        metrics["train", "early_stopping", "metric"] = train.early_stopping.metric
    for path, metric in metrics.items():
        if metric and (why := _unknown_metric(metric, run)):
            yield ConfigIssue(path, why)


def _check_eval_only(run: RunConfig) -> Issues:
    later = [stage for stage in ("export", "push") if stage in (run.pipeline.stages or ())]
    if run.train.eval_only and later:
        yield ConfigIssue(
            ("train", "eval_only"),
            f"trains nothing, so there is nothing for {' and '.join(later)}; leave"
            f" {' and '.join(later)} out of pipeline.stages",
            ("pipeline.stages",),
        )


def _check_release_metric(run: RunConfig) -> Issues:
    release, data = run.release, run.data
    if not release.name or release.metric is None:
        return
    if not data.test_datasets and not data.val_set_size:
        yield ConfigIssue(
            ("release", "metric"),
            "there is no data to compare models on; write data.test_datasets or data.val_set_size,"
            " or metric: null to release every trained model",
            ("data.val_set_size", "data.test_datasets"),
        )
    if run.train.eval_max_batches == 0:
        yield ConfigIssue(
            ("train", "eval_max_batches"),
            "0 evaluates nothing, and release.metric needs evaluations; leave it out, or write"
            " release.metric: null",
            ("release.metric",),
        )


def _check_released_model(run: RunConfig) -> Issues:
    release = run.release
    if not release.name:
        return
    if run.train.eval_only or "export" not in (run.pipeline.stages or DEFAULT_STAGES):
        why = "train.eval_only" if run.train.eval_only else "pipeline.stages without export"
        yield ConfigIssue(
            ("release", "name"),
            f"with {why} there is no model to release; leave one of the two out",
            ("train.eval_only", "pipeline.stages"),
        )
    if run.export.quantise and (release.metric or release.start_from == "release"):
        yield ConfigIssue(
            ("export", "quantise"),
            "releases are evaluated and trained further, which needs weights that are not"
            " quantized; leave it out",
            ("release.name",),
        )


EVALUATION_RULES = (
    _check_metrics,
    _check_eval_only,
    _check_release_metric,
    _check_released_model,
)
