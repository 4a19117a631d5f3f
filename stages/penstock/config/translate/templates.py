"""Names of chat templates in other tools."""

from collections.abc import Mapping

from penstock.config.translate.translation import Entry

TEMPLATE, OWN = "data.chat_template", "tokenizer"

NAMES: Mapping[str, str] = {}
"""Foreign names to those of the templates that Penstock includes."""

FALLBACK = "tokenizer_default_fallback_"


def chat_template(entry: Entry) -> None:
    """A template by name, or as text or file: `tokenizer_default` and `jinja` are none."""
    name = str(entry.value)
    if name in ("tokenizer_default", "jinja"):
        entry.no_effect("the tokenizer's own template renders conversations")
    else:
        entry.approximated("the tokenizer's own chat template is used; put this one into its files")
