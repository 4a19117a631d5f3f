"""The chat template that a run was given, beside the tokenizer's own. Imports no transformers."""

import copy
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from penstock.config.schema.base import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTemplate(Settings):
    """What `data.chat_template` and `data.chat_template_kwargs` say. Hashable."""

    text: str | None = None
    """Jinja; None for the tokenizer's own template."""

    kwargs: str = "{}"
    """Variables of the template, as a JSON object."""

    where: str = Field(default="", exclude=True)
    """Name or path of the template, for messages; not part of any key."""

    @property
    def variables(self) -> dict[str, Any]:
        """`kwargs` as values."""
        return json.loads(self.kwargs)

    def apply(self, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
        """A shallow copy of the tokenizer with the template; the same one where `text` is None."""
        if self.text is None:
            return tokenizer
        # Not in place: workers share a tokenizer among data sets, whose templates may differ.
        changed = copy.copy(tokenizer)
        changed.chat_template = self.text
        return changed

    def export(self, own: Any) -> dict[str, str]:
        """Template texts to save, by name, of a tokenizer with the template(s) `own`.

        The variables are defaults at the beginning of each, so that prompts of the exported model
        are those that it was trained with.
        """
        texts = {"default": own} if isinstance(own, str) else own or {}
        if self.text is not None:
            texts = {"default": self.text}
        defaults = "".join(
            f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} -%}}\n"
            for name, value in self.variables.items()
        )
        return {name: defaults + text for name, text in texts.items()}


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value)
