"""OmegaConf interpolation: `${a.b}`, `${.x}`, `${multiply:a,b}`."""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from penstock.config.loading import yaml12
from penstock.config.loading.fault import Steps, dotted
from penstock.core.errors import ConfigError

INNERMOST = re.compile(r"\$\{([^${}]*)\}")

FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {"multiply": lambda one, other: one * other}
"""NeMo's resolvers."""

MOST_REFERENCES = 10_000
LONGEST_TEXT = 10_000
"""Limits: a file of a few lines can refer to itself endlessly."""


def resolve_references(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with every reference replaced by its value.

    Text that is one reference becomes the value with its type; a reference within a longer text
    becomes text. `.x` is a sibling of the value, `..x` of its parent. Raises ConfigError for
    references to missing values, to themselves, or with resolvers other than `multiply`.
    """
    return cast("Mapping[str, Any]", _References(values).resolve(values, ()))


class _References:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._open: list[Steps] = []
        self._followed = 0

    def resolve(self, value: Any, at: Steps) -> Any:
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value).items()
            return {name: self.resolve(inner, (*at, name)) for name, inner in entries}
        if isinstance(value, list):
            inners = enumerate(cast("list[Any]", value))
            return [self.resolve(inner, (*at, index)) for index, inner in inners]
        if not isinstance(value, str) or "${" not in value:
            return value
        if at in self._open:
            raise ConfigError(f"{dotted(at)}: {value} refers to itself; write a value")
        self._open.append(at)
        found = self._text(value, at)
        self._open.pop()
        return found

    def _text(self, text: str, at: Steps) -> Any:
        while found := INNERMOST.search(text):
            self._followed += 1
            if self._followed > MOST_REFERENCES or len(text) > LONGEST_TEXT:
                raise ConfigError(f"{dotted(at)}: its references expand to too much; write a value")
            value = self._meant(found[1], at)
            if found[0] == text:
                return value
            text = f"{text[: found.start()]}{value}{text[found.end() :]}"
        return text

    def _meant(self, inside: str, at: Steps) -> Any:
        function, colon, arguments = inside.partition(":")
        if not colon:
            return self._value_at(inside, at)
        given = [yaml12.scalar(one.strip()) for one in arguments.split(",")]
        are_numbers = all(isinstance(one, int | float) for one in given)
        if function not in FUNCTIONS or len(given) != 2 or not are_numbers:
            raise ConfigError(
                f"{dotted(at)}: ${{{inside}}} is not supported, only"
                f" {', '.join(FUNCTIONS)} of two numbers; write its value"
            )
        return FUNCTIONS[function](*given)

    def _value_at(self, name: str, at: Steps) -> Any:
        rest = name.lstrip(".")
        ups = len(name) - len(rest)
        steps: Steps = (*(at[:-ups] if ups else ()), *rest.split("."))
        value: Any = self._values
        for step in steps:
            try:
                value = value[step if isinstance(value, dict) else int(step)]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ConfigError(
                    f"{dotted(at)}: ${{{name}}} refers to {dotted(steps)}, which does not exist;"
                    " write a value"
                ) from None
        return self.resolve(value, steps)
