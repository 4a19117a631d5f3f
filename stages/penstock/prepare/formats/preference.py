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
from penstock.prepare.bad_records import BadRow, column, number
from penstock.prepare.formats.alpaca import instruction_text, system_in
from penstock.prepare.formats.completions import (
    Said,
    answered,
    messages_at,
    messages_equal,
    no_prompt,
    read_conversation,
    read_prompt,
)
from penstock.prepare.formats.conversation import Pair
from penstock.prepare.formats.hh_rlhf import dialogue_in
from penstock.prepare.formats.messages import Turn
from penstock.prepare.settings import DatasetSettings

WORSE = "rejected_response"
"""The worse answer's usual column beside a conversation that ends with the better one."""

GREATEST_GAP = float(np.finfo(np.float32).max)
"""Between two scores: gaps are kept in fp32."""


def preference(settings: DatasetSettings, record: Mapping[str, Any]) -> Pair:
    """The two answers of a record. Raises BadRow where they cannot be told apart or used."""
    return replace(_pair(settings, record), score_gap=_score_gap(settings, record))


def _pair(settings: DatasetSettings, record: Mapping[str, Any]) -> Pair:
    asked = read_prompt(settings, record) or read_conversation(settings, record)
    if asked and asked.is_answered and record.get(settings.field_chosen) is None:
        prompt, chosen = asked.before_its_answer()
        name = settings.field_rejected
        worse = _side(WORSE if record.get(name) is None and WORSE in record else name, record)
        return build_pair(settings, record, prompt, chosen, worse)
    chosen = _side(settings.field_chosen, record)
    rejected = _side(settings.field_rejected, record)
    if asked is None and not (chosen.is_whole and rejected.is_whole):
        return _of_text(settings, record, chosen, rejected)
    return build_pair(settings, record, *_parted(asked, chosen, rejected))


def build_pair(
    settings: DatasetSettings,
    record: Mapping[str, Any],
    prompt: Said,
    chosen: Said,
    rejected: Said,
    system: str | None = None,
) -> Pair:
    """A prompt and two answers that say something, and not the same."""
    worse = rejected.as_answer()
    better = chosen.as_answer()
    if better.begins_with(worse.turns) and worse.begins_with(better.turns):
        raise BadRow("same_answers", f"{better.where} and {worse.where} are the same")
    return Pair(
        answered(settings, record, prompt, better, system),
        answered(settings, record, prompt, worse, system),
    )


def _of_text(
    settings: DatasetSettings, record: Mapping[str, Any], chosen: Said, rejected: Said
) -> Pair:
    """Two answers to what is asked as in `alpaca`, or else two dialogues that share a prompt."""
    if record.get(settings.field_instruction) is not None:
        asked = Said(settings.field_instruction, instruction_text(settings, record))
        prompt, better, worse = _parted(asked, chosen, rejected)
        return build_pair(settings, record, prompt, better, worse, system_in(settings, record))
    names = (settings.field_chosen, settings.field_rejected)
    better, worse = (dialogue_in(name, record[name]) for name in names)
    if not (better and worse and better.is_whole and worse.is_whole):
        raise no_prompt(settings, record)
    return build_pair(settings, record, *_parted(None, better, worse))


def _score_gap(settings: DatasetSettings, record: Mapping[str, Any]) -> float | None:
    """By how much the better answer is scored higher; None where scores are not asked for."""
    named = [name for field in SCORES if (name := getattr(settings, field)) is not None]
    if len(named) < len(SCORES):
        return None
    better, worse = (number(record, name) for name in named)
    if not 0 <= better - worse <= GREATEST_GAP:
        told = "the worse answer has the higher score" if better < worse else "too far apart"
        raise BadRow("bad_value", f"{named[0]} is {better:g} and {named[1]} is {worse:g}: {told}")
    return better - worse


def _side(name: str, record: Mapping[str, Any]) -> Said:
    return messages_at(name, column(record, name), "assistant")


def _parted(asked: Said | None, chosen: Said, rejected: Said) -> tuple[Said, Said, Said]:
    """Prompt, better answer and worse answer."""
    prompt = asked.as_prompt() if asked else Said("", ())
    if not chosen.is_whole and not rejected.is_whole:
        return prompt, chosen, rejected
    count = len(prompt.turns)
    if not count or not (chosen.begins_with(prompt.turns) and rejected.begins_with(prompt.turns)):
        count = _shared(chosen, rejected)
        if not count or not _ends_with(chosen.turns[:count], prompt.turns):
            what = f"what is in {prompt.where}" if asked else "the same prompt"
            why = f"{chosen.where} and {rejected.where} do not both begin with {what}"
            raise BadRow("bad_value", why)
    shared, better = chosen.parted(count)
    return shared, better, rejected.parted(count)[1]


def _ends_with(turns: Sequence[Turn], prompt: Sequence[Turn]) -> bool:
    """Whether the prompt's messages come last: a system prompt may stand before them."""
    tail = turns[len(turns) - len(prompt) :] if len(prompt) <= len(turns) else ()
    return len(tail) == len(prompt) and all(map(messages_equal, tail, prompt))


def _shared(chosen: Said, rejected: Said) -> int:
    """How many messages both begin with, up to where the assistant speaks in both."""
    sides = list(zip(chosen.turns, rejected.turns, strict=False))
    alike = next((i for i, side in enumerate(sides) if not messages_equal(*side)), len(sides))
    starts = (
        i
        for i in range(min(alike, len(sides) - 1), 0, -1)
        if all(turn.is_answer for turn in sides[i]) and not chosen.turns[i - 1].is_answer
    )
    return next(starts, 0)
