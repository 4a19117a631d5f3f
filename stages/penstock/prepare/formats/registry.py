"""Parses records by the format of their data set: one of ours, or one of an installed package."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from penstock.config.schema.data import why_not_a_template_variable
from penstock.core.errors import PenstockError, StageError
from penstock.core.extensions import FORMATS, describe_failure
from penstock.prepare.bad_records import BadRecord, check_weight, get_column
from penstock.prepare.formats.conversation import (
    RESULTS,
    DatasetFormat,
    Parsed,
    Record,
    map_conversations,
)
from penstock.prepare.formats.json_values import check_object, parse_json_text
from penstock.prepare.settings import DatasetSettings

# Column with variables of the chat template for one record, as in TRL.
TEMPLATE_KWARGS = "chat_template_kwargs"


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
        parsed: Parsed = FORMATS.load(settings.type)(settings, value)
        kwargs = _parse_template_kwargs(value.get(TEMPLATE_KWARGS))
        if not kwargs:
            return parsed
        return map_conversations(parsed, lambda part: replace(part, template_kwargs=kwargs))
    return _parse_with_package(settings, settings.part["package"], value)


def _parse_template_kwargs(value: Any) -> dict[str, Any]:
    """An object or its JSON text. Nulls are dropped: columnar files have them for absent fields."""
    if value is None or value == "":
        return {}
    named = check_object(TEMPLATE_KWARGS, parse_json_text(TEMPLATE_KWARGS, value))
    kwargs = {name: entry for name, entry in named.items() if entry is not None}
    for name in kwargs:
        if reason := why_not_a_template_variable(name):
            raise BadRecord("bad_value", f"{TEMPLATE_KWARGS} has {name!r}, {reason}")
    return kwargs


def _parse_with_package(settings: DatasetSettings, package: str, value: Record) -> Parsed:
    assert settings.part
    # As text: the key of a cache must have a hash, which a dict has not.
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
