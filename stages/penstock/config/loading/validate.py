"""From plain values to a `RunConfig`, and all errors in them at once.

Values that are invalid by themselves are replaced, so that the rules can still check the rest and
one message has all errors.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.config.loading.documented_defaults import with_usable_defaults
from penstock.config.loading.fault import ConfigIssue, Steps, dotted
from penstock.config.loading.pydantic_messages import error_message
from penstock.config.loading.schema_tree import (
    annotation_at,
    branches,
    child_annotation,
    enclosing_field,
    field_at,
    is_section,
)
from penstock.config.loading.suggest_name import suggest
from penstock.config.rules.notices import iter_notices
from penstock.config.rules.run import rule_violations
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig

# A run, or the config of a server.
Root = TypeVar("Root", bound=ConfigSection)

STAND_IN = "unset"

# Rounds of repair. Two are enough unless one error hides another, which nests only a few levels.
MOST_REPAIRS = 10


@dataclass(frozen=True)
class ValidationResult:
    """The run, its errors and its notices."""

    # With errors, only for inspection.
    run: RunConfig
    faults: list[ConfigIssue]
    # A line for each setting that is valid but is not used as written.
    notices: list[str]


def validate(settings: Mapping[str, Any]) -> ValidationResult:
    """The run in `settings`, with all errors and notices."""
    misspelled = _misspelled_sections(settings)
    run, faults = validate_fields(_with_sections(settings), RunConfig)
    faults = [fault for fault in faults if fault.path[0] not in misspelled]
    reported = [*faults, *(ConfigIssue((name,), "") for name in misspelled)]
    run, notices = with_usable_defaults(run)
    faults += [fault for fault in rule_violations(run) if not depends_on_invalid(fault, reported)]
    return ValidationResult(run, faults, [*notices, *iter_notices(run)])


def validate_fields(values: Mapping[str, Any], root: type[Root]) -> tuple[Root, list[ConfigIssue]]:
    """The values as settings, and the errors of single values, which are replaced."""
    repaired = dict(values)
    faults: list[ConfigIssue] = []
    for _ in range(MOST_REPAIRS):
        try:
            return root.model_validate(repaired), faults
        except ValidationError as error:
            issues = _faults(error, root)
            faults += issues
            repaired = _repaired(repaired, issues, root)
    raise AssertionError(f"no repair helps against {[fault.path for fault in faults]}")


def _misspelled_sections(settings: Mapping[str, Any]) -> set[str]:
    # Sections that are missing because their name is misspelled.
    unknown = [name for name in settings if name not in RunConfig.model_fields]
    meant = {suggest((name,)) for name in unknown}
    return {name for name in RunConfig.model_fields if name in meant and name not in settings}


def _with_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    # A copy in which empty and required sections are empty mappings.
    values = deepcopy(dict(settings))
    for name, field in RunConfig.model_fields.items():
        if values.get(name) is None and (name in values or field.is_required()):
            values[name] = {}
    return values


def _faults(error: ValidationError, root: type[ConfigSection]) -> list[ConfigIssue]:
    # Pydantic's errors, one for each setting: the members of a union are one error.
    details_by_path: dict[Steps, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        details_by_path.setdefault(_steps(detail["loc"], root), []).append(detail)  # pyright: ignore[reportArgumentType]
    deep = [path for path in details_by_path if annotation_at(path, root) is not None]
    return [
        ConfigIssue(path, error_message(path, details, root))
        for path, details in details_by_path.items()
        # An error at a deeper path explains this one more precisely.
        if not any(deeper != path and deeper[: len(path)] == path for deeper in deep)
    ]


def _steps(loc: tuple[int | str, ...], root: type[ConfigSection]) -> Steps:
    # The path of a pydantic error, without the names of members of unions.
    annotation: Any = root
    steps: list[int | str] = []
    # Of a union pydantic's loc names the member that was tried: ("data", "path", "list[str]", 0).
    for step in loc:
        if step == "[key]":  # the name of an entry of a mapping, which is the step before
            continue
        within = child_annotation(annotation, step)
        if within is not None:
            annotation = within
        elif not any(map(is_section, branches(annotation))):
            continue
        steps.append(step)
    return tuple(steps)


def _repaired(
    values: dict[str, Any], faults: Iterable[ConfigIssue], root: type[ConfigSection]
) -> dict[str, Any]:
    # The values without the invalid ones, or with placeholders where a value is required.
    repaired = deepcopy(values)
    for fault in faults:
        above = branches(annotation_at(fault.path[:-1], root))
        is_unknown = any(map(is_section, above)) and annotation_at(fault.path, root) is None
        path = fault.path if is_unknown else enclosing_field(fault.path, root)
        parent = _find(repaired, path[:-1])
        last: Any = path[-1]
        field = field_at(path, root)
        if isinstance(parent, list) or (field is not None and field.is_required()):
            parent[last] = _stand_in(annotation_at(path, root))
        elif isinstance(parent, dict):
            parent.pop(last, None)  # pyright: ignore[reportUnknownMemberType]
    return repaired


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
        return {name: _stand_in(field.annotation) for name, field in fields if field.is_required()}
    inner = child_annotation(branch, 0)
    return [_stand_in(inner)] if inner is not None else STAND_IN


def depends_on_invalid(fault: ConfigIssue, faults: Iterable[ConfigIssue]) -> bool:
    """Whether the error depends on a setting that is invalid itself."""
    names = {dotted(fault.path), *fault.reads}
    return any(
        name == invalid or name.startswith(f"{invalid}.") or invalid.startswith(f"{name}.")
        for invalid in (dotted(issue.path) for issue in faults)
        for name in names
    )
