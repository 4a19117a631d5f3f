"""Where each fault stands, in a line of the file or in an option, and all of them in order."""

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

Told = tuple[tuple[int, int], str]
"""The rank of a fault (those of the file by line, then those of options in order), and its text."""


def require_none(told: Sequence[Told]) -> None:
    """Raises ConfigError with a line for each fault, in order, where there is one."""
    if told:
        raise ConfigError("\n".join(text for _, text in sorted(told, key=lambda one: one[0])))


def as_meant(override: Override, root: type[ConfigSection] = RunConfig) -> Override:
    """Quote a value that YAML takes for a number or truth where the setting takes only text: a
    shell has already eaten the quotes that a file would have."""
    kinds = branches(annotation_at(override.path, root))
    if str in kinds and not set(kinds) & {bool, int, float}:
        value = yaml12.scalar(override.text)
        if isinstance(value, bool | int | float):
            return replace(override, text=f"'{override.text}'")
    return override


class ErrorLocator:
    """Says where each fault stands: in a line of the file, or in an option."""

    def __init__(
        self,
        document: yaml12.Document,
        overrides: Sequence[Override],
        path: Path | None = None,
        translation: "Translation | None" = None,
    ) -> None:
        self.faults = document.faults
        self._places = document.places
        self._path = path
        self._translation = translation
        self._options = {given.name: (at, given.option) for at, given in enumerate(overrides)}

    def of(
        self, faults: Iterable[ConfigIssue], refused: Iterable[tuple[Override, str]] = ()
    ) -> list[Told]:
        """What the text of the file has wrong, those faults that do not follow from it, and options
        that could not be put in."""
        syntax = {fault.path for fault in self.faults}
        told = [self.in_file(fault) for fault in self.faults]
        told += [self._anywhere(fault) for fault in faults if fault.path not in syntax]
        return told + [
            ((1, self._options[one.name][0]), f"{one.option}: {text}") for one, text in refused
        ]

    def _anywhere(self, fault: ConfigIssue) -> Told:
        """The fault where it was written last: an option replaces all that the file has there."""
        name = dotted(fault.path)
        for length in range(len(fault.path), 0, -1):
            part = dotted(fault.path[:length])
            if part in self._options:
                at, option = self._options[part]
                inner = "" if part == name else f"{name}: "
                return (1, at), f"{option}: {inner}{fault.text}"
        for below, (at, option) in self._options.items():
            if fault.path not in self._places and below.startswith(f"{name}."):
                return (1, at), f"{option}: {name}: {fault.text}"
        return self._translated(fault) if self._translation else self.in_file(fault)

    def in_file(self, fault: ConfigIssue) -> Told:
        """The fault with the line of the nearest thing around it that was written."""
        name = f"{dotted(fault.path)}: " if fault.path else ""
        if not self._path:
            return (0, 1), f"{name}{fault.text}"
        line = self._line(fault.path)
        return (0, line), f"{self._path}:{line}: {name}{fault.text}"

    def of_key(self, key: str, text: str) -> Told:
        """What is said of a foreign key."""
        return self.in_file(ConfigIssue(tuple(key.split(".")), text))

    def _translated(self, fault: ConfigIssue) -> Told:
        """The fault at the foreign key that the setting comes from, under both names."""
        assert self._translation
        name = dotted(fault.path)
        keys = self._translation.origins(name)
        if not keys:
            return self.of_key(name, f"{fault.text} (no key of the file decides it)")
        line = self._line(tuple(keys[0].split(".")))
        text = f"{self._path}:{line}: {keys[0]} (here {name}): {fault.text}"
        return (0, line), text

    def _line(self, path: Steps) -> int:
        parts = (path[:length] for length in range(len(path), 0, -1))
        return next((self._places[part].line for part in parts if part in self._places), 1)
