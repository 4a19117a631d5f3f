"""Small conversations and how they are parsed, for the tests of formats."""

from typing import Any

from penstock.core.extensions import FORMATS
from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.settings import DatasetSettings


def parse(record: Any, **its: Any) -> Any:
    settings = DatasetSettings(**its)
    return FORMATS.load(settings.type)(settings, record)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def told(messages):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages]


ASKED = [said("user", "2 + 2?")]
LONG = [said("system", "count"), said("user", "Hi"), said("assistant", "Hi!"), *ASKED]
GOOD, BAD = said("assistant", "4"), said("assistant", "5")


def expected(prompt, answer=GOOD, tools=None):
    messages = [*prompt, answer]
    return Conversation(messages, tools, (False,) * len(prompt) + (True,))
