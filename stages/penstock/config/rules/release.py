"""Combinations of settings of releases that cannot be honoured."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Faults
from penstock.config.rules.evaluation import untold
from penstock.config.schema.pipeline import DEFAULT_STAGES
from penstock.config.schema.release import ReleaseConfig
from penstock.config.schema.run import RunConfig


def _what_is_released_has_a_name(run: RunConfig) -> Faults:
    if run.release.name:
        return
    for name in ReleaseConfig.model_fields:
        if run.release.asks_for(name):
            yield ConfigIssue(
                ("release", name),
                "nothing is released without a name; write release.name, or leave it out",
                ("release.name",),
            )


def _a_rule_is_asked_for(run: RunConfig) -> Faults:
    its = run.release
    if not its.name:
        return
    if its.min_new_samples != 1 and its.train_when != "new_samples":
        yield ConfigIssue(
            ("release", "min_new_samples"),
            f"nobody counts with train_when: {its.train_when}; write train_when: new_samples, or"
            " leave it out",
            ("release.train_when",),
        )
    for name in ("mode", "min_delta") if its.metric is None else ():
        if getattr(its, name):
            yield ConfigIssue(
                ("release", name),
                f"nothing is compared with metric: null; write metric, or leave {name} out",
                ("release.metric",),
            )


def _models_can_be_compared(run: RunConfig) -> Faults:
    its, data = run.release, run.data
    if not its.name or its.metric is None:
        return
    if why := untold(its.metric, run):
        yield ConfigIssue(("release", "metric"), why)
    if not data.test_datasets and not data.val_set_size:
        yield ConfigIssue(
            ("release", "metric"),
            "there is nothing to compare models on; write data.test_datasets or data.val_set_size,"
            " or metric: null to release all that is trained",
            ("data.val_set_size", "data.test_datasets"),
        )
    if run.train.eval_max_batches == 0:
        yield ConfigIssue(
            ("train", "eval_max_batches"),
            "0 evaluates nothing, and release.metric compares evaluations; leave it out, or write"
            " release.metric: null",
            ("release.metric",),
        )


def _a_model_comes_of_it(run: RunConfig) -> Faults:
    its = run.release
    if not its.name:
        return
    if run.train.eval_only or "export" not in (run.pipeline.stages or DEFAULT_STAGES):
        why = "train.eval_only" if run.train.eval_only else "pipeline.stages without export"
        yield ConfigIssue(
            ("release", "name"),
            f"with {why} there is no model to release; leave one of the two out",
            ("train.eval_only", "pipeline.stages"),
        )
    if run.export.quantise and (its.metric or its.start_from == "release"):
        yield ConfigIssue(
            ("export", "quantise"),
            "models are compared and trained further by their weights as they were trained, and"
            " not rounded; leave it out",
            ("release.name",),
        )


def _starts_are_those_of_releases(run: RunConfig) -> Faults:
    if not run.release.name:
        return
    if run.data.skip_prepare_dataset:
        yield ConfigIssue(
            ("data", "skip_prepare_dataset"),
            "releases follow the sources, which are not looked at so; leave it out",
            ("release.name",),
        )
    for name in ("load_checkpoint_path", "init_checkpoint_path"):
        if getattr(run.train, name) not in (None, "auto"):
            yield ConfigIssue(
                ("train", name),
                "each model would start from this one checkpoint; leave it out, and write"
                " model.model_path for the first of them",
                ("release.name",),
            )
    if run.train.require_checkpoint:
        yield ConfigIssue(
            ("train", "require_checkpoint"),
            "each model is trained in a folder of its own, where there is none yet; leave it out",
            ("release.name",),
        )


RELEASE_RULES = (
    _what_is_released_has_a_name,
    _a_rule_is_asked_for,
    _models_can_be_compared,
    _a_model_comes_of_it,
    _starts_are_those_of_releases,
)
