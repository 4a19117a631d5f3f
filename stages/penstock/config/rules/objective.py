"""Invalid combinations of the objective, its data and its metrics, and what a release needs."""

from penstock.config.loading.fault import ConfigIssue, Issues, Steps
from penstock.config.rules.data import TEST, TRAIN, iter_datasets
from penstock.config.schema.dataset import SCORES
from penstock.config.schema.pipeline import DEFAULT_STAGES
from penstock.config.schema.run import RunConfig

# Metrics of every evaluation; with several data sets also `eval_loss/<name>`.
METRICS = ("eval_loss", "eval_perplexity", "eval_token_accuracy")

# Metrics of preference training.
PREFERENCE_METRICS = (
    "eval_loss",
    *(f"eval_rewards/{name}" for name in ("margins", "chosen", "rejected")),
)

# Metrics of preference training on pairs.
PAIR_METRICS = (*PREFERENCE_METRICS, "eval_rewards/accuracies")


def _unknown_metric(metric: str, run: RunConfig) -> str | None:
    # The error message for a metric that no evaluation has; None for a known one.
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


def _check_data_types(run: RunConfig) -> Issues:
    objective, loss = run.train.objective, run.preference.loss_type
    required, described = (
        ("kto", "rated completions") if loss == "kto" else ("preference", "preference pairs")
    )
    for path, entry in iter_datasets(run, TRAIN, TEST):
        if entry.is_typed and objective == "pretrain" and entry.type != "text":
            yield ConfigIssue(
                (*path, "type"),
                f"{entry.type} is not plain text, and train.objective: pretrain trains on all"
                " tokens of plain text; write type: text, or objective: sft",
                ("train.objective",),
            )
        if entry.is_typed and objective == "preference" and entry.kind != required:
            yield ConfigIssue(
                (*path, "type"),
                f"{entry.type} has no {described}, which train.objective: preference with"
                f" loss_type: {loss} needs; write type: {required}",
                ("train.objective", "preference.loss_type"),
            )


def _check_scores(run: RunConfig) -> Issues:
    # Either all data sets have scores of both completions, or none does.
    entries = list(iter_datasets(run, TRAIN, TEST))
    if not any(entry.is_non_default(field) for _, entry in entries for field in SCORES):
        if run.preference.offset_alpha and run.train.objective == "preference":
            yield ConfigIssue(
                ("preference", "offset_alpha"),
                "needs scores of completions, and no data set has any; name their columns in"
                f" {' and '.join(SCORES)} of each, or leave offset_alpha out",
            )
        return
    for path, entry in entries:
        if not entry.is_typed:
            continue
        named = [field for field in SCORES if entry.is_non_default(field)]
        if entry.type != "preference":
            for field in named:
                yield ConfigIssue((*path, field), f"type {entry.type} has no scores; leave it out")
            if not named and entry.kind == "preference":
                yield ConfigIssue(
                    (*path, "type"),
                    f"{entry.type} has no scores, but other data sets have; leave this one out, or"
                    " the scores of the others",
                )
            continue
        for field in SCORES:
            if field not in named:
                yield ConfigIssue(
                    (*path, field),
                    "is not set, but other columns of scores are; name the columns of both scores"
                    " in every data set, or in none",
                )


OBJECTIVE_RULES = (
    _check_metrics,
    _check_eval_only,
    _check_release_metric,
    _check_released_model,
    _check_data_types,
    _check_scores,
)
