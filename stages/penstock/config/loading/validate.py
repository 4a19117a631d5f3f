"""From plain values to settings, or to every fault in them at once.

Values that are wrong by themselves are replaced, so that the rest can still be judged as a whole:
one look at the message is to be enough.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.config.loading.documented_defaults import with_usable_defaults
from penstock.config.loading.fault import ConfigIssue, Steps, dotted
from penstock.config.loading.pydantic_messages import sentence
from penstock.config.loading.schema_tree import (
    annotation_at,
    branches,
    field_at,
    inside,
    is_section,
    owner,
    suggestion,
)
from penstock.config.rules.notices import iter_notices
from penstock.config.rules.run import rule_violations
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig

Root = TypeVar("Root", bound=ConfigSection)
"""A run, or the settings of a server."""

STAND_IN = "unset"
MOST_REPAIRS = 10
"""Rounds of repair; two suffice unless a value hides another, which nests only a few deep."""


@dataclass(frozen=True)
class Judged:
    """The run that settings describe, what is wrong with them, and what to tell about them."""

    run: RunConfig
    """With faults, only good for looking at."""
    faults: list[ConfigIssue]
    notices: list[str]
    """A line for each setting that is not used as it stands, and is not refused."""


def validate(settings: Mapping[str, Any]) -> Judged:
    """The run that `settings` describe, with all that is wrong with them."""
    misspelled = _misspelled_sections(settings)
    run, faults = valid(_with_sections(settings), RunConfig)
    faults = [fault for fault in faults if fault.path[0] not in misspelled]
    told = [*faults, *(ConfigIssue((name,), "") for name in misspelled)]
    run, notices = with_usable_defaults(run)
    faults += [fault for fault in rule_violations(run) if not touches(fault, told)]
    return Judged(run, faults, [*notices, *iter_notices(run)])


def valid(values: Mapping[str, Any], root: type[Root]) -> tuple[Root, list[ConfigIssue]]:
    """The values as settings, and what is wrong with single ones, which are replaced."""
    repaired = dict(values)
    faults: list[ConfigIssue] = []
    for _ in range(MOST_REPAIRS):
        try:
            return root.model_validate(repaired), faults
        except ValidationError as error:
            found = _faults(error, root)
            faults += found
            repaired = _repaired(repaired, found, root)
    raise AssertionError(f"no repair helps against {[fault.path for fault in faults]}")


def _misspelled_sections(settings: Mapping[str, Any]) -> set[str]:
    """Sections that are absent because their name was written wrongly."""
    unknown = [name for name in settings if name not in RunConfig.model_fields]
    meant = {suggestion((name,)) for name in unknown}
    return {name for name in RunConfig.model_fields if name in meant and name not in settings}


def _with_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which a section without content is empty, and those a run needs are there."""
    values = deepcopy(dict(settings))
    for name, field in RunConfig.model_fields.items():
        if values.get(name) is None and (name in values or field.is_required()):
            values[name] = {}
    return values


def _faults(error: ValidationError, root: type[ConfigSection]) -> list[ConfigIssue]:
    """Pydantic's findings, one for each setting: branches of a union are one finding."""
    found: dict[Steps, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_steps(detail["loc"], root), []).append(detail)  # pyright: ignore[reportArgumentType]
    deep = [path for path in found if annotation_at(path, root) is not None]
    return [
        ConfigIssue(path, sentence(path, details, root))
        for path, details in found.items()
        if not _explained_within(path, deep)
    ]


def _explained_within(path: Steps, others: Iterable[Steps]) -> bool:
    """Whether a deeper finding says more precisely what this one complains of."""
    return any(len(other) > len(path) and other[: len(path)] == path for other in others)


def _steps(loc: tuple[int | str, ...], root: type[ConfigSection]) -> Steps:
    """Where pydantic found a fault, without the names it gives to branches of unions."""
    at: Any = root
    steps: list[int | str] = []
    for step in loc:
        within = inside(at, step)
        if within is not None:
            at = within
        elif not any(map(is_section, branches(at))):
            continue
        steps.append(step)
    return tuple(steps)


def _repaired(
    values: dict[str, Any], faults: Iterable[ConfigIssue], root: type[ConfigSection]
) -> dict[str, Any]:
    """The values with each fault left out, or replaced where something must stand."""
    repaired = deepcopy(values)
    for fault in faults:
        path = fault.path if _is_unknown(fault.path, root) else owner(fault.path, root)
        parent = _find(repaired, path[:-1])
        last: Any = path[-1]
        field = field_at(path, root)
        if isinstance(parent, list) or (field is not None and field.is_required()):
            parent[last] = _stand_in(annotation_at(path, root))
        elif isinstance(parent, dict):
            parent.pop(last, None)  # pyright: ignore[reportUnknownMemberType]
    return repaired


def _is_unknown(path: Steps, root: type[ConfigSection]) -> bool:
    above = annotation_at(path[:-1], root)
    return any(map(is_section, branches(above))) and annotation_at(path, root) is None


def _find(values: Any, path: Steps) -> Any:
    for step in path:
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _stand_in(annotation: Any) -> Any:
    branch = branches(annotation)[0]
    if is_section(branch):
        fields = branch.model_fields.items()
        return {name: _stand_in(one.annotation) for name, one in fields if one.is_required()}
    inner = inside(branch, 0)
    return [_stand_in(inner)] if inner is not None else STAND_IN


def touches(fault: ConfigIssue, faults: Iterable[ConfigIssue]) -> bool:
    """Whether the fault rests on a value that is at fault itself."""
    names = {dotted(fault.path), *fault.reads}
    return any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for other in (dotted(one.path) for one in faults)
        for name in names
    )
