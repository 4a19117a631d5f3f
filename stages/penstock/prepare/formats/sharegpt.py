"""`sharegpt`: messages with `from` and `value`; tool calls and results are separate messages.

OpenAI messages may occur among them. A tool call after assistant text or another call is merged
into the same message, as models generate them.
"""

from collections.abc import Mapping
from typing import Any

from penstock.prepare.bad_records import get_column
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.formats.message_keys import message_keys
from penstock.prepare.formats.messages import (
    build_conversation,
    get_text_or_default,
    parse_messages,
)
from penstock.prepare.settings import DatasetSettings


def sharegpt(settings: DatasetSettings, record: Mapping[str, Any]) -> Conversation:
    """Parse `field_messages`, or `conversations`; the system prompt is in `field_system`."""
    name = settings.field_messages or "conversations"
    turns = parse_messages(name, get_column(record, name), message_keys(settings))
    return build_conversation(
        settings, record, turns, get_text_or_default(record, settings.field_system, "system")
    )
