"""Options of the parts that packages add, by the fields of these parts."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from penstock.config.loading.fault import ConfigIssue, Issues, Steps, dotted
from penstock.config.rules.data import iter_datasets
from penstock.config.schema.dataset import SCORES
from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError
from penstock.core.extensions import FORMATS, LOSSES, METRICS, STAGES, TRACKERS, Registry


class NamedPart(NamedTuple):
    """A part that a run names, and the path of its options."""

    registry: Registry
    name: str
    options: Mapping[str, Any]
    path: Steps
    # The field with its name, if that is not the last part of the path.
    named_by: str = ""


def named_parts(run: RunConfig) -> Iterator[NamedPart]:
    """The parts that the run names and gives options to."""
    for path, entry in iter_datasets(run):
        named_by = dotted((*path, "type"))
        options = (*path, "type_kwargs")
        yield NamedPart(FORMATS, entry.format, entry.type_kwargs, options, named_by)
    train = run.train
    loss_options = ("train", "loss_kwargs")
    yield NamedPart(LOSSES, train.loss, train.loss_kwargs, loss_options, "train.loss")
    for name, options in train.eval_metrics.items():
        yield NamedPart(METRICS, name, options, ("train", "eval_metrics", name))
    for name, options in run.pipeline.extra_stages.items():
        yield NamedPart(STAGES, name, options, ("pipeline", "extra_stages", name))
    for name, options in train.trackers.items():
        yield NamedPart(TRACKERS, name, options, ("train", "trackers", name))


def check_fields_of_ours(run: RunConfig) -> Issues:
    """Fields of a data set that formats of ours read, with one of a package."""
    for path, entry in iter_datasets(run):
        if FORMATS.find(entry.format) is None:
            continue
        for name in ("roles_to_train", "field_system", *SCORES):
            if entry.is_non_default(name):
                yield ConfigIssue(
                    (*path, name),
                    f"is read by formats of ours; {entry.format} has options of its own, in "
                    "type_kwargs; leave it out",
                )


def check_reads(run: RunConfig) -> Issues:
    """Stages of packages that read what is not there."""
    available: list[str] = [*run.stages]
    for name in run.pipeline.extra_stages:
        missing = [read for read in STAGES.load(name).reads if read not in available]
        if missing:
            yield ConfigIssue(
                ("pipeline", "extra_stages", name),
                f"reads {' and '.join(missing)}, and before it there are {', '.join(available)};"
                " add what is missing, or leave it out",
                ("pipeline.stages",),
            )
        available.append(name)


def check_options(run: RunConfig) -> Issues:
    """Options that a part does not have, or with invalid values."""
    for part in named_parts(run):
        if not part.options and part.registry.find(part.name) is None:
            continue
        try:
            part.registry.build(part.name, part.options)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = (*part.path, *detail["loc"])
                yield ConfigIssue(path, _reason(part, detail["type"], detail["msg"]))
        except ConfigError as error:
            yield ConfigIssue(part.path, str(error), (part.named_by,))


def _reason(part: NamedPart, kind: str, message: str) -> str:
    if kind != "extra_forbidden":
        return f"{message[:1].lower()}{message[1:]}"
    fields = part.registry.load(part.name).model_fields
    return f"unknown option of {part.name}; it has {', '.join(fields) or 'none'}"
