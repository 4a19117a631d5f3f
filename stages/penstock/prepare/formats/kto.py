"""`kto`: a prompt, an answer, and whether it is good.

The prompt and the answer have columns of their own, or a conversation ends with the answer.
"""

from collections.abc import Mapping
from typing import Any

from penstock.prepare.bad_records import BadRow, column, json_type_name
from penstock.prepare.formats.completions import (
    Said,
    answered,
    messages_at,
    no_prompt,
    read_conversation,
    read_prompt,
)
from penstock.prepare.formats.conversation import RatedAnswer
from penstock.prepare.settings import DatasetSettings

GOOD = ("true", "1", "yes", "good", "desirable", "chosen")
BAD = ("false", "0", "no", "bad", "undesirable", "rejected")


def kto(settings: DatasetSettings, record: Mapping[str, Any]) -> RatedAnswer:
    """A judged answer. Raises BadRow where it cannot be used."""
    desirable = _verdict(settings.field_label, column(record, settings.field_label))
    prompt, answer = _parted(settings, record)
    return RatedAnswer(answered(settings, record, prompt, answer.as_answer()), desirable)


def verdict_of(value: Any) -> bool | None:
    """Whether a value says good or bad; None where it is no verdict."""
    word = str(value).strip().lower() if isinstance(value, str) else None
    if word in GOOD or value == 1:
        return True
    return False if word in BAD or value == 0 else None


def _verdict(name: str, value: Any) -> bool:
    found = verdict_of(value)
    if found is not None:
        return found
    said = (
        f"{str(value)[:40]!r}"
        if isinstance(value, bool | int | float | str)
        else json_type_name(value)
    )
    raise BadRow(
        "bad_value", f"{name} is {said}; write true or false ({', '.join(GOOD[1:] + BAD[1:])})"
    )


def _parted(settings: DatasetSettings, record: Mapping[str, Any]) -> tuple[Said, Said]:
    """Prompt and answer."""
    name = settings.field_completion
    asked = read_prompt(settings, record) or read_conversation(settings, record)
    if asked and asked.is_answered and record.get(name) is None:
        return asked.before_its_answer()
    answer = messages_at(name, column(record, name), "assistant")
    if asked is None and not answer.is_whole:
        raise no_prompt(settings, record)
    if asked is None:
        return answer.before_its_answer()
    prompt = asked.as_prompt()
    if not answer.is_whole:
        return prompt, answer
    if answer.begins_with(prompt.turns):
        return answer.parted(len(prompt.turns))
    raise BadRow("bad_value", f"{answer.where} does not begin with what is in {prompt.where}")
