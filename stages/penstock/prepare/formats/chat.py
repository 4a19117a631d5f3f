"""`chat`: a list of messages; a column may hold labels of the assistant's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.prepare.bad_records import get_column
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.json_values import parse_json_text
from penstock.prepare.formats.message_keys import message_keys
from penstock.prepare.formats.messages import (
    Turn,
    build_conversation,
    parse_labels,
    parse_messages,
)
from penstock.prepare.settings import DatasetSettings


def chat(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse `field_messages`, or `messages`. Raises BadRecord if they cannot be used."""
    name = settings.field_messages or "messages"
    turns = parse_messages(name, get_column(record, name), message_keys(settings))
    labels = record.get(settings.field_label)
    return build_conversation(settings, record, _apply_labels(settings.field_label, labels, turns))


def _apply_labels(location: str, value: Any, turns: list[Turn]) -> list[Turn]:
    """Mark assistant messages with label 0 as untrained.

    Labels are a list, possibly as JSON text; a label column with other values is unrelated.
    """
    is_text = isinstance(value, str) and value.lstrip().startswith("[")
    parsed = parse_json_text(location, value) if is_text else value
    if not isinstance(parsed, list):
        return turns
    count = sum(turn.is_answer for turn in turns)
    labels = iter(parse_labels(location, parsed, count, "one for each message of the assistant's"))
    return [
        replace(turn, weight=next(labels) * turn.weight) if turn.is_answer else turn
        for turn in turns
    ]
