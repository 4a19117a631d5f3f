"""Locations of errors: the line of the file or the command-line option, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.loading import yaml12
from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.fault import ConfigIssue, Steps, dotted
from penstock.config.loading.schema_tree import annotation_at, branches
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config.translate.translation import Translation

# Sort key of an error (those of the file by line, then those of options in order), and its text.
LocatedError = tuple[tuple[int, int], str]


def raise_if_any(errors: Sequence[LocatedError]) -> None:
    """Raises ConfigError with a line for each error, in order, if there is one."""
    if errors:
        raise ConfigError("\n".join(text for _, text in sorted(errors, key=lambda error: error[0])))


def quote_text_value(override: Override, root: type[ConfigSection] = RunConfig) -> Override:
    """Quote a value that YAML reads as a number or boolean if the setting takes only text: a shell
    has removed the quotes that a file would have."""
    kinds = branches(annotation_at(override.path, root))
    if str in kinds and not set(kinds) & {bool, int, float}:
        value = yaml12.scalar(override.text)
        if isinstance(value, bool | int | float):
            return replace(override, text=f"'{override.text}'")
    return override


class ErrorLocator:
    """Finds the line of the file or the option of each error."""

    def __init__(
        self,
        document: yaml12.Document,
        overrides: Sequence[Override],
        path: Path | None = None,
        translation: "Translation | None" = None,
    ) -> None:
        self.faults = document.faults
        self._places = document.positions
        self._path = path
        self._translation = translation
        self._options = {
            override.name: (index, override.option) for index, override in enumerate(overrides)
        }

    def locate(
        self, faults: Iterable[ConfigIssue], refused: Iterable[tuple[Override, str]] = ()
    ) -> list[LocatedError]:
        """Syntax errors of the file, errors that do not follow from them, and overrides that
        failed."""
        # A value that YAML could not read is null here, of which the schema would complain too.
        syntax = {fault.path for fault in self.faults}
        located = [self.in_file(fault) for fault in self.faults]
        located += [self._anywhere(fault) for fault in faults if fault.path not in syntax]
        return located + [
            ((1, self._options[override.name][0]), f"{override.option}: {text}")
            for override, text in refused
        ]

    def _anywhere(self, fault: ConfigIssue) -> LocatedError:
        # The error where it was written last: an option replaces the value in the file.
        name = dotted(fault.path)
        for length in range(len(fault.path), 0, -1):
            part = dotted(fault.path[:length])
            if part in self._options:
                index, option = self._options[part]
                inner = "" if part == name else f"{name}: "
                return (1, index), f"{option}: {inner}{fault.text}"
        for below, (index, option) in self._options.items():
            if fault.path not in self._places and below.startswith(f"{name}."):
                return (1, index), f"{option}: {name}: {fault.text}"
        return self._translated(fault) if self._translation else self.in_file(fault)

    def in_file(self, fault: ConfigIssue) -> LocatedError:
        """The error with the line of the nearest enclosing setting that is in the file."""
        name = f"{dotted(fault.path)}: " if fault.path else ""
        if not self._path:
            return (0, 1), f"{name}{fault.text}"
        line = self._line(fault.path)
        return (0, line), f"{self._path}:{line}: {name}{fault.text}"

    def at_key(self, key: str, text: str) -> LocatedError:
        """An error at a key of a foreign file."""
        return self.in_file(ConfigIssue(_steps(key), text))

    def _translated(self, fault: ConfigIssue) -> LocatedError:
        # The error at the foreign key that the setting was translated from, with both names.
        assert self._translation
        name = dotted(fault.path)
        keys = self._translation.origins(name)
        if not keys:
            why = f"no key of the file decides it: add --{name} VALUE"
            return self.at_key(name, f"{fault.text} ({why})")
        line = self._line(_steps(keys[0]))
        text = f"{self._path}:{line}: {keys[0]} (here {name}): {fault.text}"
        return (0, line), text

    def _line(self, path: Steps) -> int:
        parts = (path[:length] for length in range(len(path), 0, -1))
        return next((self._places[part].line for part in parts if part in self._places), 1)


def _steps(key: str) -> Steps:
    return tuple(int(step) if step.isdecimal() else step for step in key.split("."))
