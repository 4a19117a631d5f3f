"""Options of the parts that packages add, by the fields of these parts."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from penstock.config.loading.fault import ConfigIssue, Issues, Steps
from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError
from penstock.core.extensions import FORMATS, Registry


class NamedPart(NamedTuple):
    """A part that a run names, and the path of its options."""

    registry: Registry
    name: str
    options: Mapping[str, Any]
    path: Steps


def named_parts(run: RunConfig) -> Iterator[NamedPart]:
    """The parts that the run names and gives options to."""
    for field in ("datasets", "test_datasets", "decontaminate_datasets"):
        for index, entry in enumerate(getattr(run.data, field)):
            path = ("data", field, index, "type_kwargs")
            yield NamedPart(FORMATS, entry.format, entry.type_kwargs, path)


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
            yield ConfigIssue(part.path, str(error))


def _reason(part: NamedPart, kind: str, message: str) -> str:
    if kind != "extra_forbidden":
        return f"{message[:1].lower()}{message[1:]}"
    fields = part.registry.load(part.name).model_fields
    return f"unknown option of {part.name}; it has {', '.join(fields) or 'none'}"
