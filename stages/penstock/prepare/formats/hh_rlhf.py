"""Dialogues in one text, as in hh-rlhf: turns that start with `Human:` or `Assistant:`.

A turn starts at the beginning of the text or after an empty line, and is stripped.
"""

import re
from typing import Any

from penstock.prepare.bad_records import check_text
from penstock.prepare.formats.completions import Messages
from penstock.prepare.formats.messages import text_turn

SPEAKERS = {"Human": "user", "Assistant": "assistant"}

_TURN = re.compile(rf"(?:\A\s*|\n\n)({'|'.join(SPEAKERS)}):")


def parse_dialogue(where: str, value: Any) -> Messages | None:
    """Parse the turns of a dialogue text; None for any other value."""
    if not isinstance(value, str):
        return None
    ahead, *parts = _TURN.split(check_text(where, value))
    if ahead or not parts:
        return None
    turns = zip(parts[::2], parts[1::2], strict=True)
    return Messages(
        where, [text_turn(SPEAKERS[speaker], words.strip()) for speaker, words in turns]
    )
