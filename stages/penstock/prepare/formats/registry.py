"""Parses records by the format of their data set: one of ours, or one of an installed package."""

import json
from collections.abc import Sequence
from functools import cache

from penstock.core.errors import PenstockError, StageError
from penstock.core.extensions import FORMATS, describe_failure
from penstock.prepare.bad_records import BadRecord, check_weight, get_column
from penstock.prepare.formats.conversation import (
    RESULTS,
    DatasetFormat,
    Parsed,
    Record,
)
from penstock.prepare.formats.template_kwargs import with_template_kwargs
from penstock.prepare.settings import DatasetSettings


def parse_record(
    settings: DatasetSettings, value: Record | BadRecord, columns: Sequence[str] | None
) -> Parsed:
    """Parse a record, of which only `columns` are used if they are given. Raises BadRecord; of a
    package's format, StageError for any other error."""
    if isinstance(value, BadRecord):
        raise value
    if columns is not None:
        value = {name: get_column(value, name) for name in columns}
    if settings.part is None:
        return with_template_kwargs(FORMATS.load(settings.type)(settings, value), value)
    return _parse_with_package(settings, settings.part["package"], value)


def _parse_with_package(settings: DatasetSettings, package: str, value: Record) -> Parsed:
    assert settings.part
    format = _dataset_format(settings.type, json.dumps(settings.part["options"]))
    try:
        parsed = format.parse(value)
    except (BadRecord, PenstockError):
        raise
    except Exception as error:
        raise StageError(
            f"type: {settings.type} of {package} cannot parse a record: {describe_failure(error)}"
        ) from error
    if not isinstance(parsed, RESULTS[format.kind]):
        raise StageError(
            f"type: {settings.type} of {package} returns a {type(parsed).__name__}; formats of the "
            f"kind {format.kind} return a {RESULTS[format.kind].__name__}."
        )
    return parsed


@cache
def _dataset_format(name: str, options: str) -> DatasetFormat:
    return FORMATS.build(name, json.loads(options))


def parse_weight(settings: DatasetSettings, value: Record | BadRecord) -> float:
    """The record's loss weight: 1 if no column is named or its value is null.

    Raises BadRecord for a record that weighs 0, of which nothing is trained.
    """
    name = settings.field_weight
    if name is None or isinstance(value, BadRecord):
        return 1.0
    value_of_column = get_column(value, name)
    weight = 1.0 if value_of_column is None else check_weight(name, value_of_column)
    if not weight:
        raise BadRecord("no_trained_tokens", f"its {name} is 0")
    return weight
