"""`alpaca`: an instruction with its input, an answer, and what was said before them."""

from collections.abc import Mapping
from typing import Any

from penstock.prepare.bad_records import BadRow, checked_text, json_type_name, text
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.instruction import BREAK
from penstock.prepare.formats.messages import Turn, assembled, text_turn, usual_text
from penstock.prepare.settings import DatasetSettings

HISTORY = "history"


def alpaca(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """What is asked, and the answer in `field_output`."""
    asked = instruction_text(settings, record)
    answer = text(record, settings.field_output)
    if not answer.strip():
        raise BadRow("empty", f"{settings.field_output} is empty")
    turns = [*asked, text_turn("assistant", answer)]
    return assembled(settings, record, turns, system_in(settings, record))


def instruction_text(settings: DatasetSettings, record: Mapping[str, Any]) -> list[Turn]:
    """The question in `field_instruction` and `field_input`, after the turns in `history`."""
    asked = (
        text(record, settings.field_instruction),
        usual_text(record, settings.field_input, "input"),
    )
    question = BREAK.join(part for part in asked if part.strip())
    if not question.strip():
        raise BadRow("empty", f"{settings.field_instruction} is empty")
    return [*_earlier(record.get(HISTORY)), text_turn("user", question)]


def system_in(settings: DatasetSettings, record: Mapping[str, Any]) -> str:
    """The system prompt in `field_system`, or `system`; empty where there is none."""
    return usual_text(record, settings.field_system, "system")


def _earlier(value: Any) -> list[Turn]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{HISTORY} is {json_type_name(value)} where a list is meant")
    turns: list[Turn] = []
    for index, entry in enumerate(value):
        where = f"{HISTORY}[{index}]"
        if not isinstance(entry, list) or len(entry) != 2:
            raise BadRow("wrong_type", f"{where} is not a list of a question and an answer")
        for place, role in enumerate(("user", "assistant")):
            turns.append(text_turn(role, checked_text(f"{where}[{place}]", entry[place])))
    return turns
