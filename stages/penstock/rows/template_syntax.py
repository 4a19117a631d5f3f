"""Syntax and variables of chat templates."""

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from penstock.core.errors import ConfigError

log = logging.getLogger("penstock.prepare")


class TemplateVariables:
    """The variables that chat templates read, and warnings about others."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def warn_unread(self, names: Iterable[str], location: str) -> None:
        """Warn once of each variable in `names` that is not read."""
        for name in names:
            if name not in self._names:
                self._names.add(name)
                log.warning("%s sets %s, which the chat template does not read.", location, name)


class _GenerationBlocks(Extension):
    """Parses `{% generation %}`, of transformers."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> Sequence[nodes.Node]:  # pyright: ignore[reportIncompatibleMethodOverride]
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# As transformers'.
ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
)


@lru_cache(maxsize=128)
def template_variables(text: str, location: str) -> frozenset[str]:
    """The variables that a template reads. Raises ConfigError with the line if it is no Jinja."""
    try:
        # Compiled as well: only then does Jinja look whether filters and tests exist.
        ENVIRONMENT.compile(text)
        return frozenset(find_undeclared_variables(ENVIRONMENT.parse(text)))
    except (RecursionError, MemoryError, OverflowError, SecurityError) as error:
        raise ConfigError(
            f"The chat template cannot be read: {location}: {error or type(error).__name__}\n"
            "  Correct it there, or name another in data.chat_template."
        ) from error
    except TemplateSyntaxError as error:
        lines = text.splitlines()
        shown = lines[error.lineno - 1].strip()[:80] if error.lineno <= len(lines) else ""
        raise ConfigError(
            f"The chat template cannot be read: {location}, line {error.lineno}: {error.message}\n"
            f"  {shown}\n  Correct it there, or name another in data.chat_template."
        ) from error
