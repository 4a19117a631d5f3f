"""`sft_turns` and `preference_turns`: ERNIEKit's columns `src`, `tgt` and `response`.

`src` holds what the user says and `tgt` what the assistant answers, one text or a list of them.
White space around a text is left out and a blank text makes a record unusable, as it does there.
A system prompt is in `field_system` (or `system`), or is the first text of `src` where `is_system`
is 1; then `tgt` and `label` may hold an entry for it, which means nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.prepare.bad_records import BadRow, checked_text, column, json_type_name, sized
from penstock.prepare.formats.completions import Said
from penstock.prepare.formats.conversation import Conversation, Pair
from penstock.prepare.formats.labels import labels_in
from penstock.prepare.formats.messages import Turn, assembled, text_turn, usual_text
from penstock.prepare.formats.preference import build_pair
from penstock.prepare.settings import DatasetSettings

SIDES = 2


def sft_turns(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """As many answers as questions; `label` has a 0 for each answer that is not to be trained."""
    system, asked = _asked(settings, record)
    said = _texts("tgt", column(record, "tgt"))
    given = record.get("label")
    labels = [True] * len(said)
    if given is not None:
        labels = labels_in("label", given, len(said), "as long as tgt")
    said, labels = _those_to_questions(record, said, len(asked)), labels[-len(asked) :]
    _match(asked, said, len(asked))
    turns = _alternating(asked, said)
    trained = [labels[place // 2] if turn.is_answer else False for place, turn in enumerate(turns)]
    return assembled(
        settings,
        record,
        [Turn(turn.message, is_used) for turn, is_used in zip(turns, trained, strict=True)],
        system,
    )


def preference_turns(settings: DatasetSettings, record: Mapping[str, Any]) -> Pair:
    """One answer less than questions, and two to the last in `response`, ranked by `sort`.

    A response is a text, or an odd number of them: the assistant's, the user's, the assistant's, …
    """
    system, asked = _asked(settings, record)
    earlier = record.get("tgt")
    said = _texts("tgt", earlier) if earlier else []
    said = _those_to_questions(record, said, len(asked) - 1)
    _match(asked, said, len(asked) - 1)
    responses = column(record, "response")
    if not isinstance(responses, list) or len(responses) != SIDES:
        raise BadRow("wrong_type", f"response is {sized(responses)} where a list of 2 is meant")
    chosen = _better(column(record, "sort"))
    return build_pair(
        settings,
        record,
        Said("src", _alternating(asked, said)),
        _response(responses, chosen),
        _response(responses, 1 - chosen),
        system,
    )


def _asked(settings: DatasetSettings, record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The system prompt, empty where there is none, and what the user says."""
    system = usual_text(record, settings.field_system, "system").strip()
    asked = _texts("src", column(record, "src"))
    if not _begins_with_the_system(record):
        return system, asked
    if system:
        raise BadRow("bad_value", "is_system is 1 and there is a system prompt of its own too")
    if len(asked) == 1:
        raise BadRow("bad_value", "src has nothing but a system prompt (is_system is 1)")
    return asked[0], asked[1:]


def _begins_with_the_system(record: Mapping[str, Any]) -> bool:
    value = record.get("is_system")
    if value is not None and (not isinstance(value, int) or value not in (0, 1)):
        raise BadRow("bad_value", f"is_system is {sized(value)} where 0 or 1 is meant")
    return bool(value)


def _those_to_questions(record: Mapping[str, Any], said: list[str], count: int) -> list[str]:
    """The answers without the one that stands beside a system prompt in `src`."""
    return said[1:] if _begins_with_the_system(record) and len(said) == count + 1 else said


def _match(asked: Sequence[str], said: Sequence[str], count: int) -> None:
    if len(said) != count:
        raise BadRow(
            "bad_value",
            f"src has {len(asked)} texts of the user's and tgt {len(said)} where {count} are meant",
        )
    _are_filled("src", asked)
    _are_filled("tgt", said)


def _are_filled(name: str, texts: Sequence[str]) -> None:
    if not all(texts):
        raise BadRow("empty", f"{name} has an empty text")


def _alternating(asked: Sequence[str], said: Sequence[str]) -> list[Turn]:
    """Questions and answers one after the other, beginning with a question."""
    turns: list[Turn] = []
    for place, question in enumerate(asked):
        turns.append(text_turn("user", question))
        turns += [text_turn("assistant", answer) for answer in said[place : place + 1]]
    return turns


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise BadRow(
            "wrong_type", f"{name} is {json_type_name(value)} where a list of texts is meant"
        )
    if not texts:
        raise BadRow("empty", f"{name} is empty")
    return [checked_text(f"{name}[{i}]", text).strip() for i, text in enumerate(texts)]


def _response(responses: Sequence[Any], index: int) -> Said:
    where = f"response[{index}]"
    texts = _texts(where, responses[index])
    if len(texts) % 2 == 0:
        why = f"{where} has {len(texts)} texts; the first and the last are the assistant's"
        raise BadRow("bad_value", why)
    _are_filled(where, texts)
    roles = ("assistant", "user")
    return Said(where, [text_turn(roles[place % 2], text) for place, text in enumerate(texts)])


def _better(ranks: Any) -> int:
    """Which of two responses has the higher rank."""
    are_two = isinstance(ranks, list) and len(ranks) == SIDES
    if not are_two or not all(isinstance(rank, int | float) for rank in ranks):
        raise BadRow("wrong_type", f"sort is {sized(ranks)} where a list of 2 numbers is meant")
    if not (ranks[0] < ranks[1] or ranks[1] < ranks[0]):
        raise BadRow("bad_value", f"sort ranks both responses alike ({ranks[0]}, {ranks[1]})")
    return int(ranks[1] > ranks[0])
