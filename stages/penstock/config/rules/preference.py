"""Invalid combinations of the objective, preference settings and data."""

from penstock.config.loading.fault import ConfigIssue, Issues
from penstock.config.schema.dataset import SCORES, Kind
from penstock.config.schema.preference import PreferenceConfig
from penstock.config.schema.run import RunConfig

LISTS = ("datasets", "test_datasets")


def required_kind(preference: PreferenceConfig) -> Kind:
    """The kind of samples that the loss needs."""
    return "kto" if preference.loss_type == "kto" else "preference"


def _check_data_types(run: RunConfig) -> Issues:
    objective, required = run.train.objective, required_kind(run.preference)
    for name in LISTS:
        for index, entry in enumerate(getattr(run.data, name)):
            if not entry.is_typed:
                continue
            path = ("data", name, index, "type")
            kind = entry.kind
            if objective == "pretrain" and entry.type != "text":
                yield ConfigIssue(
                    path,
                    f"{entry.type} is not plain text, and train.objective: pretrain trains on all"
                    " tokens of plain text; write type: text, or objective: sft",
                    ("train.objective",),
                )
            if objective == "preference" and kind != required:
                yield ConfigIssue(
                    path,
                    f"{entry.type} has no {_describe_kind(required)}, which train.objective:"
                    f" preference with loss_type: {run.preference.loss_type} needs; write type:"
                    f" {required}",
                    ("train.objective", "preference.loss_type"),
                )


def _check_scores(run: RunConfig) -> Issues:
    """Either all data sets have scores of both completions, or none does."""
    entries = [
        (("data", name, index), entry)
        for name in LISTS
        for index, entry in enumerate(getattr(run.data, name))
    ]
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


def _describe_kind(kind: Kind) -> str:
    return "rated completions" if kind == "kto" else "preference pairs"


PREFERENCE_RULES = (
    _check_data_types,
    _check_scores,
)
