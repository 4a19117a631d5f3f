"""`kto`: a prompt, a completion, and whether it is desirable.

Prompt and completion have their own columns, or a conversation ends with the completion.
"""

from collections.abc import Mapping
from typing import Any

from penstock.prepare.bad_records import BadRecord, get_column, json_type_name
from penstock.prepare.formats.completions import (
    Messages,
    build_completion,
    missing_prompt,
    parse_any_messages,
    read_conversation,
    read_prompt,
)
from penstock.prepare.formats.conversation import RatedCompletion
from penstock.prepare.settings import DatasetSettings

GOOD = ("true", "1", "yes", "good", "desirable", "chosen")
BAD = ("false", "0", "no", "bad", "undesirable", "rejected")


def kto(settings: DatasetSettings, record: Mapping[str, Any]) -> RatedCompletion:
    """Parse a rated completion. Raises BadRecord if it cannot be used."""
    value = get_column(record, settings.field_label)
    desirable = parse_kto_label(value)
    if desirable is None:
        is_scalar = isinstance(value, bool | int | float | str)
        shown = f"{str(value)[:40]!r}" if is_scalar else json_type_name(value)
        words = ", ".join(GOOD[1:] + BAD[1:])
        why = f"{settings.field_label} is {shown}; write true or false ({words})"
        raise BadRecord("bad_value", why)
    prompt, answer = _split_prompt(settings, record)
    return RatedCompletion(
        build_completion(settings, record, prompt, answer.require_answer()), desirable
    )


def parse_kto_label(value: Any) -> bool | None:
    """True for desirable, False for undesirable; None if the value is neither."""
    label = str(value).strip().lower() if isinstance(value, str) else None
    # Also True, which equals 1, as False does 0.
    if label in GOOD or value == 1:
        return True
    return False if label in BAD or value == 0 else None


def _split_prompt(
    settings: DatasetSettings, record: Mapping[str, Any]
) -> tuple[Messages, Messages]:
    name = settings.field_completion
    written_prompt = read_prompt(settings, record) or read_conversation(settings, record)
    if written_prompt and written_prompt.ends_with_assistant and record.get(name) is None:
        return written_prompt.split_last_answer()
    answer = parse_any_messages(settings, name, get_column(record, name), "assistant")
    if written_prompt is None and not answer.is_conversation:
        raise missing_prompt(settings, record)
    if written_prompt is None:
        return answer.split_last_answer()
    prompt = written_prompt.require_prompt()
    if not answer.is_conversation:
        return prompt, answer
    if answer.starts_with(prompt.turns):
        return answer.split_at(len(prompt.turns))
    raise BadRecord("bad_value", f"{answer.where} does not begin with what is in {prompt.where}")
