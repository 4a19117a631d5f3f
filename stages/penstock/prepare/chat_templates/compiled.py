"""Chat templates, compiled by transformers and rendered without its copies.

`render_jinja_template` copies all that a template sees, because it may be any object, and looks up
the template's globals one by one. Both take as long as rendering. What is rendered here is JSON,
which the sandbox does not let a template change.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from transformers.utils import chat_template_utils

Block = tuple[int, int]
"""[start, stop) of a generation block, in characters."""


class CompiledTemplate:
    """Renders conversations as `render_jinja_template` does."""

    def __init__(self, template: Any) -> None:
        self._template = template
        environment = template.environment
        if not isinstance(environment.getattr, partial):
            environment.getattr = partial(_key_or_attribute, environment.getattr)
        # render_jinja_template passes `documents`, too: a template that tests it would find it
        # undefined.
        self._globals: dict[str, Any] = {**template.globals, "documents": None}

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


DICT_ATTRIBUTES = frozenset(dir(dict))


def _key_or_attribute(general: Callable[[Any, str], Any], value: Any, name: str) -> Any:
    """As `Environment.getattr`, which first asks a message for an attribute `role`, and raises and
    catches an AttributeError each time that a template writes `message.role`."""
    if type(value) is dict and name in value and name not in DICT_ATTRIBUTES:
        return value[name]
    return general(value, name)


class PublicTemplate:
    """The same by transformers' public function, with its copies."""

    def __init__(self, text: str) -> None:
        self._text = text

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """As `CompiledTemplate.render`."""
        return self._render(messages, variables)[0]

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, list[Block]]:
        """As `CompiledTemplate.render_marked`."""
        return self._render(messages, variables, return_assistant_tokens_mask=True)

    def _render(self, messages: Any, variables: Mapping[str, Any], **options: bool) -> Any:
        render: Any = chat_template_utils.render_jinja_template
        texts, blocks = render([messages], chat_template=self._text, **options, **variables)
        return texts[0], blocks[0] if blocks else []


@lru_cache(maxsize=128)
def compile_template(text: str) -> CompiledTemplate | PublicTemplate:
    """The template with this text. Raises jinja2's TemplateSyntaxError if it is no Jinja."""
    # Not public: a version of transformers may lack it.
    compile_jinja = getattr(chat_template_utils, "_compile_jinja_template", None)
    return CompiledTemplate(compile_jinja(text)) if compile_jinja else PublicTemplate(text)
