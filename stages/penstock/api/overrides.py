"""Overrides from Python: values by section, by dotted name, or as on the command line."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from penstock.config.loading.cli_overrides import OPTION, Override, parse_value, split_overrides
from penstock.core.errors import ConfigError

ASSIGNMENT = re.compile(
    r"(?:--)?(?P<name>[A-Za-z_]\w*(?:\.[\w-]+)+)\s*(?:=|\s)\s*(?P<value>.+)", re.S
)
"""`train.lr=1e-5`, with or without dashes, and `--train.lr 1e-5` in one string."""

UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that YAML allows only escaped."""

Overrides = str | Mapping[str, Any]
"""A setting as on the command line (`"train.lr=1e-5"`), or values by dotted name."""


def parse_overrides(overrides: Iterable[Overrides], sections: Mapping[str, Any]) -> list[Override]:
    """The overrides in order, those of `sections` last.

    Strings are parsed as on the command line. Values of mappings are not parsed: a string stays a
    string. A mapping sets each of its fields: `train={"lr": 1e-5}` is `--train.lr 1e-5`.
    Raises ConfigError for strings that are no setting, and for values that YAML cannot represent.
    """
    parsed: list[Override] = []
    arguments: list[str] = []
    for override in overrides:
        if isinstance(override, str):
            arguments.append(override)
            continue
        parsed += [
            *_parse_words(arguments),
            *(_override(name, value) for name, value in override.items()),
        ]
        arguments = []
    parsed += _parse_words(arguments)
    for section, fields in sections.items():
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"{section} is {fields!r}, and a section is a mapping of its fields.\n"
                f"  Write {section}={{'field': value}}."
            )
        parsed += [_override(f"{section}.{name}", value) for name, value in fields.items()]
    return parsed


def format_value(value: Any) -> str:
    """A value as YAML that `cli_overrides.parse_value` parses to the same value.

    Raises TypeError for anything but a number, string, path, list or mapping.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if value is None or isinstance(value, bool | int | float | str):
        # YAML has no surrogate pairs, which ASCII JSON uses beyond 16 bits.
        text = json.dumps(value, ensure_ascii=False)
        return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    if isinstance(value, PathLike):
        return format_value(fspath(value))
    if isinstance(value, Mapping):
        pairs = (f"{format_value(str(name))}: {format_value(item)}" for name, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return f"[{', '.join(map(format_value, value))}]"
    number = getattr(value, "item", None)  # of numpy or torch
    if callable(number):
        return format_value(number())
    raise TypeError(f"{type(value).__name__} is no plain value")


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as parsed from YAML: paths as strings, tuples as lists.

    Raises ConfigError for a value that YAML cannot represent.
    """
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        plain[str(name)], _ = parse_value(_formatted(str(name), value))
    return plain


def _override(name: str, value: Any) -> Override:
    return Override(name, _formatted(name, value))


def _formatted(name: str, value: Any) -> str:
    try:
        return format_value(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: {error}.\n  Write numbers, text, paths, lists and mappings of them."
        ) from None


def _parse_words(arguments: Sequence[str]) -> list[Override]:
    """Parse strings that are settings each, or the arguments of a command line."""
    argv: list[str] = []
    for argument in arguments:
        option = OPTION.fullmatch(argv[-1]) if argv else None
        is_value = option is not None and option["value"] is None
        assignment = None if is_value else ASSIGNMENT.fullmatch(argument)
        argv.append(f"--{assignment['name']}={assignment['value']}" if assignment else argument)
    unparsed, parsed = split_overrides(argv)
    if unparsed:
        raise ConfigError(
            f"{' '.join(unparsed)}: no setting; write section.field=value, for example "
            "train.lr=1e-5"
        )
    return parsed
