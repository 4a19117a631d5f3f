"""`sft_turns` and `preference_turns`: ERNIEKit's columns `src`, `tgt` and `response`.

`src` holds what the user says and `tgt` what the assistant answers, one text or a list of them.
White space around a text is left out and a blank text makes a record unusable, as it does there.
A system prompt is in `field_system` (or `system`), or is the first text of `src` where `is_system`
is 1; then `tgt` and `label` may hold an entry for it, which means nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.prepare.bad_records import (
    BadRecord,
    check_list,
    check_text,
    describe_value,
    get_column,
)
from penstock.prepare.formats.completions import Messages
from penstock.prepare.formats.conversation import Conversation, PreferencePair
from penstock.prepare.formats.messages import (
    Turn,
    build_conversation,
    get_text_or_default,
    parse_labels,
    text_turn,
)
from penstock.prepare.formats.preference import build_pair
from penstock.prepare.formats.text_info import TEXTS, text_info
from penstock.prepare.settings import DatasetSettings

SIDES = 2


def sft_turns(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse a conversation: one answer per question; answers with `label` 0 are not trained.

    Data with images has `text_info` in their place.
    """
    if TEXTS in record:
        return text_info(settings, record)
    system, questions = _parse_prompt(settings, record)
    answers = _parse_texts("tgt", get_column(record, "tgt"))
    written_labels = record.get("label")
    labels = [True] * len(answers)
    if written_labels is not None:
        labels = parse_labels("label", written_labels, len(answers), "as long as tgt")
    answers, labels = _drop_system_entry(record, answers, len(questions)), labels[-len(questions) :]
    _require_counts(questions, answers, len(questions))
    turns = _alternate(questions, answers)
    for turn, label in zip(turns[1::2], labels, strict=True):
        turn.weight *= label
    return build_conversation(settings, record, turns, system)


def preference_turns(settings: DatasetSettings, record: Mapping[str, Any]) -> PreferencePair:
    """Parse a pair: `response` has two answers to the last question, ranked by `sort`.

    A response is one text, or an odd number of alternating assistant and user texts.
    """
    system, questions = _parse_prompt(settings, record)
    earlier = record.get("tgt")
    answers = _parse_texts("tgt", earlier) if earlier else []
    answers = _drop_system_entry(record, answers, len(questions) - 1)
    _require_counts(questions, answers, len(questions) - 1)
    responses = get_column(record, "response")
    if not isinstance(responses, list) or len(responses) != SIDES:
        why = f"response is {describe_value(responses)} where a list of 2 is meant"
        raise BadRecord("wrong_type", why)
    chosen = _preferred_index(get_column(record, "sort"))
    return build_pair(
        settings,
        record,
        Messages("src", _alternate(questions, answers)),
        _parse_response(responses, chosen),
        _parse_response(responses, 1 - chosen),
        system,
    )


def _parse_prompt(settings: DatasetSettings, record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(system prompt, empty if there is none; user messages)."""
    system = get_text_or_default(record, settings.field_system, "system").strip()
    questions = _parse_texts("src", get_column(record, "src"))
    if not _has_system_in_src(record):
        return system, questions
    if system:
        raise BadRecord("bad_value", "is_system is 1 and there is a system prompt of its own too")
    if len(questions) == 1:
        raise BadRecord("bad_value", "src has nothing but a system prompt (is_system is 1)")
    return questions[0], questions[1:]


def _has_system_in_src(record: Mapping[str, Any]) -> bool:
    value = record.get("is_system")
    if value is not None and (not isinstance(value, int) or value not in (0, 1)):
        raise BadRecord("bad_value", f"is_system is {describe_value(value)} where 0 or 1 is meant")
    return bool(value)


def _drop_system_entry(record: Mapping[str, Any], answers: list[str], count: int) -> list[str]:
    """The answers without the entry for a system prompt in `src`."""
    return answers[1:] if _has_system_in_src(record) and len(answers) == count + 1 else answers


def _require_counts(questions: Sequence[str], answers: Sequence[str], count: int) -> None:
    if len(answers) != count:
        why = f"src has {len(questions)} texts of the user's and tgt {len(answers)} where {count}"
        raise BadRecord("bad_value", f"{why} are meant")
    _require_no_empty("src", questions)
    _require_no_empty("tgt", answers)


def _require_no_empty(name: str, texts: Sequence[str]) -> None:
    if not all(texts):
        raise BadRecord("empty", f"{name} has an empty text")


def _alternate(questions: Sequence[str], answers: Sequence[str]) -> list[Turn]:
    turns: list[Turn] = []
    for index, question in enumerate(questions):
        turns.append(text_turn("user", question))
        turns += [text_turn("assistant", answer) for answer in answers[index : index + 1]]
    return turns


def _parse_texts(name: str, value: Any) -> list[str]:
    texts = check_list(name, [value] if isinstance(value, str) else value, "a list of texts")
    if not texts:
        raise BadRecord("empty", f"{name} is empty")
    return [check_text(f"{name}[{i}]", text).strip() for i, text in enumerate(texts)]


def _parse_response(responses: Sequence[Any], index: int) -> Messages:
    location = f"response[{index}]"
    texts = _parse_texts(location, responses[index])
    if len(texts) % 2 == 0:
        why = f"{location} has {len(texts)} texts; the first and the last are the assistant's"
        raise BadRecord("bad_value", why)
    _require_no_empty(location, texts)
    roles = ("assistant", "user")
    return Messages(
        location, [text_turn(roles[index % 2], text) for index, text in enumerate(texts)]
    )


def _preferred_index(ranks: Any) -> int:
    are_two = isinstance(ranks, list) and len(ranks) == SIDES
    if not are_two or not all(isinstance(rank, int | float) for rank in ranks):
        why = f"sort is {describe_value(ranks)} where a list of 2 numbers is meant"
        raise BadRecord("wrong_type", why)
    # Not `==`, for which NaN is no tie: Python's JSON reads NaN.
    if not (ranks[0] < ranks[1] or ranks[1] < ranks[0]):
        raise BadRecord("bad_value", f"sort ranks both responses alike ({ranks[0]}, {ranks[1]})")
    return int(ranks[1] > ranks[0])
