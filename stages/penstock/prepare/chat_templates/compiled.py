"""Chat templates, compiled by transformers and rendered without its copies.

`render_jinja_template` copies all that a template sees, because it may be any object, and looks up
the template's globals one by one. Both take as long as rendering. What is rendered here is JSON,
which the sandbox does not let a template change.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage]
)

Block = tuple[int, int]
"""[start, stop) of a generation block, in characters."""


class CompiledTemplate:
    """Renders conversations as `render_jinja_template` does."""

    def __init__(self, text: str) -> None:
        self._template: Any = _compile_jinja_template(text)
        self._globals: dict[str, Any] = {**self._template.globals, "documents": None}

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises what the template does."""
        return "".join(self._generate(messages, variables))

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, list[Block]]:
        """The text of a conversation, and its generation blocks."""
        parts: list[str] = []
        blocks: list[Block] = []
        with self._template.environment.activate_tracker(parts, blocks):
            # Part by part: a block begins behind the parts that are in the list.
            for part in self._generate(messages, variables):
                parts.append(part)
        return "".join(parts), blocks

    def _generate(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Any:
        names = {**self._globals, **variables, "messages": messages}
        template, environment = self._template, self._template.environment
        context = environment.context_class(environment, names, template.name, template.blocks)
        return template.root_render_func(context)


@lru_cache(maxsize=128)
def compile_template(text: str) -> CompiledTemplate:
    """The template with this text. Raises jinja2's TemplateSyntaxError if it is no Jinja."""
    return CompiledTemplate(text)
