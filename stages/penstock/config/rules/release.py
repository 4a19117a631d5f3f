"""Invalid combinations of release settings."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Issues
from penstock.config.rules.evaluation import unknown_metric
from penstock.config.schema.pipeline import DEFAULT_STAGES
from penstock.config.schema.release import ReleaseConfig
from penstock.config.schema.run import RunConfig


def _check_release_name(run: RunConfig) -> Issues:
    if run.release.name:
        return
    for name in ReleaseConfig.model_fields:
        if run.release.is_non_default(name):
            yield ConfigIssue(
                ("release", name),
                "nothing is released without release.name; write it, or leave this out",
                ("release.name",),
            )


def _check_release_options(run: RunConfig) -> Issues:
    release = run.release
    if not release.name:
        return
    if release.min_new_samples != 1 and release.train_when != "new_samples":
        yield ConfigIssue(
            ("release", "min_new_samples"),
            f"is not used with train_when: {release.train_when}; write train_when: new_samples, or"
            " leave it out",
            ("release.train_when",),
        )
    for name in ("mode", "min_delta") if release.metric is None else ():
        if getattr(release, name):
            yield ConfigIssue(
                ("release", name),
                f"is not used with metric: null; write metric, or leave {name} out",
                ("release.metric",),
            )


def _check_release_metric(run: RunConfig) -> Issues:
    release, data = run.release, run.data
    if not release.name or release.metric is None:
        return
    if why := unknown_metric(release.metric, run):
        yield ConfigIssue(("release", "metric"), why)
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


def _check_exported_model(run: RunConfig) -> Issues:
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


def _check_start(run: RunConfig) -> Issues:
    if not run.release.name:
        return
    if run.data.skip_prepare_dataset:
        yield ConfigIssue(
            ("data", "skip_prepare_dataset"),
            "releases follow changes of the sources, which this ignores; leave it out",
            ("release.name",),
        )
    for name in ("load_checkpoint_path", "init_checkpoint_path"):
        if getattr(run.train, name) not in (None, "auto"):
            yield ConfigIssue(
                ("train", name),
                "every run would start from this checkpoint; leave it out, and write"
                " model.model_path for the first run",
                ("release.name",),
            )
    if run.train.require_checkpoint:
        yield ConfigIssue(
            ("train", "require_checkpoint"),
            "each run has a new folder without checkpoints; leave it out",
            ("release.name",),
        )


RELEASE_RULES = (
    _check_release_name,
    _check_release_options,
    _check_release_metric,
    _check_exported_model,
    _check_start,
)
