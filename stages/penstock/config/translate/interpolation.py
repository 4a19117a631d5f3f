"""OmegaConf interpolation: `${a.b}`, `${.x}`, `${multiply:a,b}`."""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from penstock.config.loading import yaml12
from penstock.config.loading.fault import Steps, dotted
from penstock.core.errors import ConfigError

INNERMOST = re.compile(r"\$\{([^${}]*)\}")

# NeMo's resolvers.
FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {"multiply": lambda left, right: left * right}

MOST_REFERENCES = 10_000

# Limits: a file of a few lines can refer to itself endlessly.
LONGEST_TEXT = 10_000


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

    def resolve(self, value: Any, path: Steps) -> Any:
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value).items()
            return {name: self.resolve(inner, (*path, name)) for name, inner in entries}
        if isinstance(value, list):
            inners = enumerate(cast("list[Any]", value))
            return [self.resolve(inner, (*path, index)) for index, inner in inners]
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self._open:
            raise ConfigError(f"{dotted(path)}: {value} refers to itself; write a value")
        self._open.append(path)
        resolved = self._text(value, path)
        self._open.pop()
        return resolved

    def _text(self, text: str, path: Steps) -> Any:
        # From inside out, as OmegaConf nests them: `${a.${b}}`.
        while reference := INNERMOST.search(text):
            self._followed += 1
            if self._followed > MOST_REFERENCES or len(text) > LONGEST_TEXT:
                raise ConfigError(
                    f"{dotted(path)}: its references expand to too much; write a value"
                )
            value = self._meant(reference[1], path)
            if reference[0] == text:
                return value
            text = f"{text[: reference.start()]}{value}{text[reference.end() :]}"
        return text

    def _meant(self, inside: str, path: Steps) -> Any:
        function, colon, arguments = inside.partition(":")
        if not colon:
            return self._value_at(inside, path)
        numbers = [yaml12.scalar(argument.strip()) for argument in arguments.split(",")]
        are_numbers = all(isinstance(argument, int | float) for argument in numbers)
        if function not in FUNCTIONS or len(numbers) != 2 or not are_numbers:
            raise ConfigError(
                f"{dotted(path)}: ${{{inside}}} is not supported, only"
                f" {', '.join(FUNCTIONS)} of two numbers; write its value"
            )
        return FUNCTIONS[function](*numbers)

    def _value_at(self, name: str, path: Steps) -> Any:
        relative = name.lstrip(".")
        ups = len(name) - len(relative)
        steps: Steps = (*(path[:-ups] if ups else ()), *relative.split("."))
        value: Any = self._values
        for step in steps:
            try:
                value = value[step if isinstance(value, dict) else int(step)]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ConfigError(
                    f"{dotted(path)}: ${{{name}}} refers to {dotted(steps)}, which does not exist;"
                    " write a value"
                ) from None
        return self.resolve(value, steps)
