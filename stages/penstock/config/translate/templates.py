"""Chat templates of other tools: names, text, and files."""

from collections.abc import Mapping

from penstock.config.schema.data import is_inline_template
from penstock.config.translate.translation import Entry

TEMPLATE = "data.chat_template"

NAMES: Mapping[str, str] = {"chatml": "chatml"}
"""Foreign names to those of the templates that Penstock includes."""

TOKENIZERS = ("tokenizer_default", "jinja", "default", "empty")
FILES = (".jinja", ".jinja2", ".j2")


def chat_template(entry: Entry) -> None:
    """A template by name, as text, or as a file."""
    name = str(entry.value)
    if is_inline_template(name) or name.endswith(FILES):
        entry.draft.put(TEMPLATE, name)
        entry.decides(TEMPLATE)
    elif name in NAMES:
        entry.draft.put(TEMPLATE, NAMES[name])
        entry.decides(TEMPLATE)
    elif name in TOKENIZERS:
        entry.no_effect("the tokenizer's own template renders conversations, unless one is written")
    else:
        entry.approximated(
            f"the tokenizer's own template is taken for {name}; data.chat_template names another"
        )
