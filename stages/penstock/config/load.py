"""From a configuration file and overrides to a run. The only file here that reads files.

All faults are told at once, each with the line or the option it stands in.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from penstock.config import yaml12
from penstock.config.faults import Fault, Steps, dotted
from penstock.config.judge import judge
from penstock.config.overrides import Override, apply
from penstock.config.run import RunConfig
from penstock.config.shape import annotation_at, branches
from penstock.core.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


def load(path: Path, overrides: Sequence[Override] = ()) -> RunConfig:
    """The run that the YAML file describes, with the overrides put in, the later ones last.

    Raises ConfigError, whose text has one line for each fault.
    """
    text = _text(path)
    try:
        document = yaml12.parse(text)
    except yaml12.YamlError as error:
        raise ConfigError(f"{path}:{error.line}: not valid YAML: {error}") from None
    if document.value is None and not document.faults and not overrides:
        raise ConfigError(
            f"{path}: the file is empty; write the sections model, data and train,"
            " or copy a file from configs/"
        )
    settings: Any = {} if document.value is None else document.value
    if not isinstance(settings, dict):
        line = document.places[()].line
        raise ConfigError(
            f"{path}:{line}: the top level is no mapping; write sections such as model:, data:,"
            " train:, each on a line of its own"
        )
    return _run(cast("dict[str, Any]", settings), overrides, document, path)


def loads(settings: Mapping[str, Any], overrides: Sequence[Override] = ()) -> RunConfig:
    """The run that plain values describe: nested mappings, as YAML would give them.

    Raises ConfigError, whose text has one line for each fault.
    """
    return _run(settings, overrides, yaml12.Document(), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
        there = f" and holds {', '.join(inside[:5])}" if inside else ""
        raise ConfigError(f"{path} is a folder{there}; name a YAML file") from None
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist{_near_files(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8;"
            " save the file as UTF-8"
        ) from None
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ConfigError(f"{path} cannot be read: {reason}; name a readable YAML file") from None


def _near_files(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in SUFFIXES]
    except OSError:
        return f", and neither does the folder {path.parent}; name a YAML file"
    near = get_close_matches(path.name, names, 1) or sorted(names)[:1]
    return f"; did you mean {path.with_name(near[0])}?" if near else "; name a YAML file"


def _run(
    settings: Mapping[str, Any],
    overrides: Sequence[Override],
    document: yaml12.Document,
    path: Path | None,
) -> RunConfig:
    given = [_as_meant(override) for override in overrides]
    values, refused = apply(settings, given)
    run, faults = judge(values)
    told = _Teller(document.places, given, path)
    lines = [told.in_file(fault) for fault in document.faults]
    syntax = {fault.path for fault in document.faults}
    lines += [told.anywhere(fault) for fault in faults if fault.path not in syntax]
    lines += [((1, given.index(one)), f"{one.option}: {text}") for one, text in refused]
    if lines:
        raise ConfigError("\n".join(text for _, text in sorted(lines, key=lambda line: line[0])))
    return run


def _as_meant(override: Override) -> Override:
    """Quote a value that YAML takes for a number or truth where the setting takes only text: a
    shell has already eaten the quotes that a file would have."""
    kinds = branches(annotation_at(override.path))
    if str in kinds and not set(kinds) & {bool, int, float}:
        value = yaml12.scalar(override.text)
        if isinstance(value, bool | int | float):
            return Override(override.name, f"'{override.text}'")
    return override


Told = tuple[tuple[int, int], str]
"""The rank of a fault (those of the file by line, then those of options in order), and its text."""


class _Teller:
    """Says where each fault stands: in a line of the file, or in an option."""

    def __init__(
        self,
        places: Mapping[Steps, yaml12.Place],
        overrides: Sequence[Override],
        path: Path | None,
    ) -> None:
        self._places = places
        self._path = path
        self._options = {given.name: (at, given.option) for at, given in enumerate(overrides)}

    def anywhere(self, fault: Fault) -> Told:
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
        return self.in_file(fault)

    def in_file(self, fault: Fault) -> Told:
        """The fault with the line of the nearest thing around it that was written."""
        name = f"{dotted(fault.path)}: " if fault.path else ""
        if not self._path:
            return (0, 1), f"{name}{fault.text}"
        parts = (fault.path[:length] for length in range(len(fault.path), 0, -1))
        line = next((self._places[part].line for part in parts if part in self._places), 1)
        return (0, line), f"{self._path}:{line}: {name}{fault.text}"
