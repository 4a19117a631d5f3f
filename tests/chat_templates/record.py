"""Records what a published chat template renders: `python -m tests.chat_templates.record NAME FILE
SOURCE [BOS [EOS]]`.

Writes `tests/golden/chat_templates/NAME.json`. See the README there.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.chat_templates.conversations import CHATS, Chat, fixed_date, without_nulls

GOLDEN = Path(__file__).parents[1] / "golden" / "chat_templates"
REFUSED = "refused"
FAULTS = (UndefinedError, TypeError, ValueError, KeyError, AttributeError)
"""Errors of a template that does not know a form of message."""


def render(template: str, chat: Chat, tokens: Mapping[str, Any], *, prompt: bool) -> str:
    """The text of a conversation, by transformers."""
    tools: Any = chat.tools
    texts, _ = render_jinja_template(
        [chat.messages],
        tools=tools,
        chat_template=fixed_date(template),
        add_generation_prompt=prompt,
        **{**tokens, **chat.variables},
    )
    return texts[0]


def record(template: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """By conversation: [text, what follows it with a generation prompt, or {"whole": the text with
    it} where that begins otherwise]. `REFUSED`: the template raises an exception of its own."""
    found: dict[str, Any] = {}
    for name, chat in CHATS.items():
        dropped = replace(chat, messages=without_nulls(chat.messages))
        for form in (dropped, chat):
            try:
                text, asked = (render(template, form, tokens, prompt=p) for p in (False, True))
                break
            except FAULTS:
                continue
            except TemplateError:
                found[name] = REFUSED
        else:
            continue
        if _drops(chat, text):
            found.pop(name, None)
            continue
        prompt = asked.removeprefix(text) if asked.startswith(text) else {"whole": asked}
        found[name] = [text, prompt]
    return found


def _drops(chat: Chat, text: str) -> bool:
    """Whether a message, or the tools, are silently left out."""
    shown = [m["content"] or "" for m in chat.messages if m["role"] != "assistant"]
    calls = [
        "Oslo" if "Oslo" in str(call) else "Rómá"
        for m in chat.messages
        for call in m.get("tool_calls", ())
    ]
    tools = [tool["function"]["description"][:9] for tool in chat.tools or []]
    return not all(part.strip() in text for part in [*shown, *tools, *calls])


def main(name: str, file: str, source: str, bos: str = "", eos: str = "") -> None:
    """Record one template."""
    tokens = {"bos_token": bos, "eos_token": eos}
    texts = record(Path(file).read_text(), tokens)
    found = {"source": source, "tokens": tokens, "texts": texts}
    content = json.dumps(found, ensure_ascii=False, indent=0)
    (GOLDEN / f"{name}.json").write_text(content + "\n")
    told = sum(isinstance(text, list) for text in texts.values())
    sys.stdout.write(f"{name}: {told} rendered, {len(texts) - told} refused\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
