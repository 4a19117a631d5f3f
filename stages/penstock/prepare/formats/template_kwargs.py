"""Column `chat_template_kwargs`, as in TRL: variables of the chat template for one record."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.config.schema.data import why_not_a_template_variable
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.formats.conversation import (
    Conversation,
    Parsed,
    PreferencePair,
    RatedCompletion,
    Record,
)
from penstock.prepare.formats.json_values import check_object, parse_json_text

COLUMN = "chat_template_kwargs"


def with_template_kwargs(parsed: Parsed, record: Record) -> Parsed:
    """The parsed record, whose conversations have the variables that its column sets."""
    kwargs = _parse(record.get(COLUMN))
    if not kwargs:
        return parsed
    if isinstance(parsed, PreferencePair):
        chosen, rejected = (_extend(side, kwargs) for side in (parsed.chosen, parsed.rejected))
        return replace(parsed, chosen=chosen, rejected=rejected)
    if isinstance(parsed, RatedCompletion):
        return replace(parsed, conversation=_extend(parsed.conversation, kwargs))
    return _extend(parsed, kwargs) if isinstance(parsed, Conversation) else parsed


def _extend(conversation: Conversation, kwargs: Mapping[str, Any]) -> Conversation:
    return replace(conversation, template_kwargs=kwargs)


def _parse(value: Any) -> dict[str, Any]:
    """An object or its JSON text. Nulls are dropped: columnar files have them for absent fields."""
    if value is None or value == "":
        return {}
    named = check_object(COLUMN, parse_json_text(COLUMN, value))
    kwargs = {name: entry for name, entry in named.items() if entry is not None}
    for name in kwargs:
        if reason := why_not_a_template_variable(name):
            raise BadRecord("bad_value", f"{COLUMN} has {name!r}, {reason}")
    return kwargs
