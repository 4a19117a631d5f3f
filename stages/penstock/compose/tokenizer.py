"""Tokenizer and chat template of a composed model."""

from collections.abc import Sequence
from typing import Any

from penstock.compose.form import IMAGE_TOKEN
from penstock.core.errors import CapabilityError
from penstock.rows.tokenizer import load_tokenizer

# Before a chat template whose messages have one text: it joins the parts of each message, with the
# image token for an image.
FLATTEN = (
    # Namespaces: in Jinja, what is `set` in a loop is gone after each pass.
    "{%- set flat = namespace(messages=[]) -%}"
    "{%- for message in messages -%}"
    "{%- set text = namespace(content='') -%}"
    "{%- if message.content is string -%}"
    "{%- set text.content = message.content -%}"
    "{%- elif message.content is iterable and message.content is not mapping -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{%- set text.content = text.content + 'IMAGE\\n' -%}"
    "{%- elif part.type == 'text' -%}{%- set text.content = text.content + part.text -%}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- set flat.messages = flat.messages + [dict(message, content=text.content)] -%}"
    "{%- endfor -%}"
    "{%- set messages = flat.messages -%}"
).replace("IMAGE", IMAGE_TOKEN)


def with_tokens(tokenizer: str, revision: str | None, tokens: Sequence[str]) -> Any:
    """The tokenizer with the tokens, and a chat template that takes messages with images.

    Raises CapabilityError if it has no chat template.
    """
    extended: Any = load_tokenizer(tokenizer, revision)
    if not isinstance(extended.chat_template, str):
        raise CapabilityError(
            f"the tokenizer of {tokenizer} has no chat template, which says where images are.\n"
            "  Name a model that was trained on chats, or write a chat_template.jinja there."
        )
    extended.add_special_tokens({"additional_special_tokens": [*tokens]})
    extended.chat_template = FLATTEN + extended.chat_template
    return extended
