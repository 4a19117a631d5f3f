"""`preference`: a prompt, a better and a worse answer, however they are nested.

A prompt has a column of its own; or it is a conversation (`field_messages`, `messages` or
`conversations`), which may end with the better answer; or both answers are whole conversations, and
it is what they have in common, up to where the assistant speaks; or it is asked as in `alpaca`; or
both answers are texts that hold whole dialogues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.config.schema.dataset import SCORES
from penstock.prepare.bad_records import BadRecord, get_column, get_number
from penstock.prepare.formats.alpaca import instruction_turns, system_prompt
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
from penstock.prepare.formats.hh_rlhf import parse_dialogue
from penstock.prepare.formats.messages import Turn
from penstock.prepare.settings import DatasetSettings

REJECTED_RESPONSE = "rejected_response"
"""The worse answer's usual column beside a conversation that ends with the better one."""

MAX_SCORE_GAP = float(np.finfo(np.float32).max)
"""Between two scores: gaps are kept in fp32."""


def preference(settings: DatasetSettings, record: Mapping[str, Any]) -> PreferencePair:
    """The two answers of a record. Raises BadRecord where they cannot be told apart or used."""
    return replace(_parse_pair(settings, record), score_gap=_score_gap(settings, record))


def _parse_pair(settings: DatasetSettings, record: Mapping[str, Any]) -> PreferencePair:
    asked = read_prompt(settings, record) or read_conversation(settings, record)
    if asked and asked.ends_with_assistant and record.get(settings.field_chosen) is None:
        prompt, chosen = asked.split_last_answer()
        name = settings.field_rejected
        worse = _parse_side(
            REJECTED_RESPONSE if record.get(name) is None and REJECTED_RESPONSE in record else name,
            record,
        )
        return build_pair(settings, record, prompt, chosen, worse)
    chosen = _parse_side(settings.field_chosen, record)
    rejected = _parse_side(settings.field_rejected, record)
    if asked is None and not (chosen.is_conversation and rejected.is_conversation):
        return _pair_from_text(settings, record, chosen, rejected)
    return build_pair(settings, record, *_split_prompt(asked, chosen, rejected))


def build_pair(
    settings: DatasetSettings,
    record: Mapping[str, Any],
    prompt: Messages,
    chosen: Messages,
    rejected: Messages,
    system: str | None = None,
) -> PreferencePair:
    """A prompt and two answers that say something, and not the same."""
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
    """Two answers to what is asked as in `alpaca`, or else two dialogues that share a prompt."""
    if record.get(settings.field_instruction) is not None:
        asked = Messages(settings.field_instruction, instruction_turns(settings, record))
        prompt, better, worse = _split_prompt(asked, chosen, rejected)
        return build_pair(settings, record, prompt, better, worse, system_prompt(settings, record))
    names = (settings.field_chosen, settings.field_rejected)
    better, worse = (parse_dialogue(name, record[name]) for name in names)
    if not (better and worse and better.is_conversation and worse.is_conversation):
        raise missing_prompt(settings, record)
    return build_pair(settings, record, *_split_prompt(None, better, worse))


def _score_gap(settings: DatasetSettings, record: Mapping[str, Any]) -> float | None:
    """By how much the better answer is scored higher; None where scores are not asked for."""
    named = [name for field in SCORES if (name := getattr(settings, field)) is not None]
    if len(named) < len(SCORES):
        return None
    better, worse = (get_number(record, name) for name in named)
    if not 0 <= better - worse <= MAX_SCORE_GAP:
        told = "the worse answer has the higher score" if better < worse else "too far apart"
        raise BadRecord(
            "bad_value", f"{named[0]} is {better:g} and {named[1]} is {worse:g}: {told}"
        )
    return better - worse


def _parse_side(name: str, record: Mapping[str, Any]) -> Messages:
    return parse_any_messages(name, get_column(record, name), "assistant")


def _split_prompt(
    asked: Messages | None, chosen: Messages, rejected: Messages
) -> tuple[Messages, Messages, Messages]:
    """Prompt, better answer and worse answer."""
    prompt = asked.require_prompt() if asked else Messages("", ())
    if not chosen.is_conversation and not rejected.is_conversation:
        return prompt, chosen, rejected
    count = len(prompt.turns)
    if not count or not (chosen.starts_with(prompt.turns) and rejected.starts_with(prompt.turns)):
        count = _shared_prompt_length(chosen, rejected)
        if not count or not _ends_with(chosen.turns[:count], prompt.turns):
            what = f"what is in {prompt.where}" if asked else "the same prompt"
            why = f"{chosen.where} and {rejected.where} do not both begin with {what}"
            raise BadRecord("bad_value", why)
    shared, better = chosen.split_at(count)
    return shared, better, rejected.split_at(count)[1]


def _ends_with(turns: Sequence[Turn], prompt: Sequence[Turn]) -> bool:
    """Whether the prompt's messages come last: a system prompt may stand before them."""
    tail = turns[len(turns) - len(prompt) :] if len(prompt) <= len(turns) else ()
    return len(tail) == len(prompt) and all(map(messages_equal, tail, prompt))


def _shared_prompt_length(chosen: Messages, rejected: Messages) -> int:
    """How many messages both begin with, up to where the assistant speaks in both."""
    sides = list(zip(chosen.turns, rejected.turns, strict=False))
    alike = next((i for i, side in enumerate(sides) if not messages_equal(*side)), len(sides))
    starts = (
        i
        for i in range(min(alike, len(sides) - 1), 0, -1)
        if all(turn.is_answer for turn in sides[i]) and not chosen.turns[i - 1].is_answer
    )
    return next(starts, 0)
