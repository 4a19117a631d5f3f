"""`preference`: a prompt, a chosen and a rejected completion, in several layouts.

The prompt is one of: its own column; a conversation (`field_messages`, `messages` or
`conversations`), which may end with the chosen completion; the common prefix of two whole
conversations, up to an assistant message; `alpaca` columns; the common prefix of two dialogue
texts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.config.schema.dataset import SCORES
from penstock.prepare.bad_records import BadRecord, check_text, get_column, get_number
from penstock.prepare.formats.alpaca import question_turns
from penstock.prepare.formats.completions import (
    Messages,
    build_completion,
    messages_equal,
    missing_prompt,
    parse_any_messages,
    read_conversation,
    read_prompt,
)
from penstock.prepare.formats.conversation import PreferencePair
from penstock.prepare.formats.messages import Turn, text_turn
from penstock.prepare.settings import DatasetSettings

REJECTED_RESPONSE = "rejected_response"
"""Default column of the rejected completion beside a conversation that ends with the chosen one."""

# Maximum score difference: it is stored in fp32.
MAX_SCORE_GAP = float(np.finfo(np.float32).max)


def preference(settings: DatasetSettings, record: Mapping[str, Any]) -> PreferencePair:
    """Parse a pair. Raises BadRecord if it cannot be used or its completions are equal."""
    return replace(_parse_pair(settings, record), score_gap=_score_gap(settings, record))


def _parse_pair(settings: DatasetSettings, record: Mapping[str, Any]) -> PreferencePair:
    written_prompt = read_prompt(settings, record) or read_conversation(settings, record)
    if (
        written_prompt
        and written_prompt.ends_with_assistant
        and record.get(settings.field_chosen) is None
    ):
        prompt, chosen = written_prompt.split_last_answer()
        name = settings.field_rejected
        worse = _parse_side(
            settings,
            REJECTED_RESPONSE if record.get(name) is None and REJECTED_RESPONSE in record else name,
            record,
        )
        return build_pair(settings, record, prompt, chosen, worse)
    chosen = _parse_side(settings, settings.field_chosen, record)
    rejected = _parse_side(settings, settings.field_rejected, record)
    if written_prompt is None and not (chosen.is_conversation and rejected.is_conversation):
        return _pair_from_text(settings, record, chosen, rejected)
    return build_pair(settings, record, *_split_prompt(written_prompt, chosen, rejected))


def build_pair(
    settings: DatasetSettings,
    record: Mapping[str, Any],
    prompt: Messages,
    chosen: Messages,
    rejected: Messages,
    system: str | None = None,
) -> PreferencePair:
    """Build a pair of two non-empty, different completions."""
    worse = rejected.require_answer()
    better = chosen.require_answer()
    if better.starts_with(worse.turns) and worse.starts_with(better.turns):
        raise BadRecord("same_answers", f"{better.where} and {worse.where} are the same")
    return PreferencePair(
        build_completion(settings, record, prompt, better, system),
        build_completion(settings, record, prompt, worse, system),
    )


def _pair_from_text(
    settings: DatasetSettings, record: Mapping[str, Any], chosen: Messages, rejected: Messages
) -> PreferencePair:
    """Parse two completions of an `alpaca` prompt, or two dialogue texts with a common prompt."""
    if record.get(settings.field_instruction) is not None:
        name = settings.field_instruction
        prompt = Messages(name, question_turns(settings, record, name))
        return build_pair(settings, record, *_split_prompt(prompt, chosen, rejected))
    names = (settings.field_chosen, settings.field_rejected)
    better, worse = (parse_dialogue(name, record[name]) for name in names)
    if not (better and worse and better.is_conversation and worse.is_conversation):
        raise missing_prompt(settings, record)
    return build_pair(settings, record, *_split_prompt(None, better, worse))


def _score_gap(settings: DatasetSettings, record: Mapping[str, Any]) -> float | None:
    """Chosen score minus rejected score; None if no score columns are set."""
    named = [name for field in SCORES if (name := getattr(settings, field)) is not None]
    if len(named) < len(SCORES):
        return None
    better, worse = (get_number(record, name) for name in named)
    if not 0 <= better - worse <= MAX_SCORE_GAP:
        problem = "the worse answer has the higher score" if better < worse else "too far apart"
        raise BadRecord(
            "bad_value", f"{named[0]} is {better:g} and {named[1]} is {worse:g}: {problem}"
        )
    return better - worse


def _parse_side(settings: DatasetSettings, name: str, record: Mapping[str, Any]) -> Messages:
    return parse_any_messages(settings, name, get_column(record, name), "assistant")


def _split_prompt(
    written_prompt: Messages | None, chosen: Messages, rejected: Messages
) -> tuple[Messages, Messages, Messages]:
    prompt = written_prompt.require_prompt() if written_prompt else Messages("", ())
    if not chosen.is_conversation and not rejected.is_conversation:
        return prompt, chosen, rejected
    count = len(prompt.turns)
    if not count or not (chosen.starts_with(prompt.turns) and rejected.starts_with(prompt.turns)):
        count = _shared_prompt_length(chosen, rejected)
        if not count or not _ends_with(chosen.turns[:count], prompt.turns):
            expected = f"what is in {prompt.where}" if written_prompt else "the same prompt"
            why = f"{chosen.where} and {rejected.where} do not both begin with {expected}"
            raise BadRecord("bad_value", why)
    shared, better = chosen.split_at(count)
    return shared, better, rejected.split_at(count)[1]


def _ends_with(turns: Sequence[Turn], prompt: Sequence[Turn]) -> bool:
    """Whether `prompt` is a suffix of `turns`; a system prompt may precede it."""
    tail = turns[len(turns) - len(prompt) :] if len(prompt) <= len(turns) else ()
    return len(tail) == len(prompt) and all(map(messages_equal, tail, prompt))


def _shared_prompt_length(chosen: Messages, rejected: Messages) -> int:
    """Number of common messages before the last position where the assistant answers in both."""
    sides = list(zip(chosen.turns, rejected.turns, strict=False))
    alike = next((i for i, side in enumerate(sides) if not messages_equal(*side)), len(sides))
    starts = (
        i
        for i in range(min(alike, len(sides) - 1), 0, -1)
        if all(turn.is_answer for turn in sides[i]) and not chosen.turns[i - 1].is_answer
    )
    return next(starts, 0)


SPEAKERS = {"Human": "user", "Assistant": "assistant"}

_TURN = re.compile(rf"(?:\A\s*|\n\n)({'|'.join(SPEAKERS)}):")


def parse_dialogue(location: str, value: Any) -> Messages | None:
    """Parse a dialogue in one text, as in hh-rlhf; None for any other value.

    A turn starts with `Human:` or `Assistant:` at the beginning of the text or after an empty line,
    and is stripped.
    """
    if not isinstance(value, str):
        return None
    ahead, *parts = _TURN.split(check_text(location, value))
    if ahead or not parts:
        return None
    turns = zip(parts[::2], parts[1::2], strict=True)
    return Messages(
        location, [text_turn(SPEAKERS[speaker], text.strip()) for speaker, text in turns]
    )
