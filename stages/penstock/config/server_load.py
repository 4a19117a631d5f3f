"""From a training server's flat file and `--server.key value` to its settings.

All faults are told at once, each with the line or the option it stands in: those of the file
itself, and those that the workers would find.
"""

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from penstock.config import yaml12
from penstock.config.dialects.known import recognised
from penstock.config.faults import Fault, Steps, dotted, shown
from penstock.config.load import document_of
from penstock.config.overrides import Override, apply
from penstock.config.sentences import LIMITS
from penstock.config.server import ServerConfig, judged
from penstock.config.shape import branches, example, wanted
from penstock.core.errors import ConfigError

PREFIX = "server."
"""Of options that are for the server's file."""
LISTED = "configs/SERVER.md lists those there are"
STAND_IN = "unset"
"""For a setting that must be there, so that the others are judged."""

AFTER_ALL = sys.maxsize

Detail = Mapping[str, Any]


def load_server(path: Path, overrides: Sequence[Override] = ()) -> ServerConfig:
    """The settings in a server's file, with the overrides put in, the later ones last.

    Raises ConfigError, whose text has one line for each fault.
    """
    document = document_of(path, may_be_empty=bool(overrides))
    _require_flat(path, document)
    stray = [one for one in overrides if not one.name.startswith(PREFIX)]
    bare = {
        Override(one.name.removeprefix(PREFIX), _as_meant(one)): one
        for one in overrides
        if one not in stray
    }
    values, refused = apply(document.value, list(bare))
    config, faults = _judge(values)
    told = [_told(path, document, list(bare), fault) for fault in [*document.faults, *faults]]
    told += [(AFTER_ALL, f"{bare[one].option}: {text}") for one, text in refused]
    told += [(AFTER_ALL, f"{one.option}: {_no_section(one)}") for one in stray]
    lines = [text for _, text in sorted(told, key=lambda line: line[0])]
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    return config


def _require_flat(path: Path, document: yaml12.Document) -> None:
    settings: Mapping[str, Any] = document.value
    dialect = recognised(settings)
    sections = {"model", "train", "data"} & settings.keys()
    if sections or (dialect is not None and dialect.name != "server"):
        raise ConfigError(
            f"{path} is no server's file"
            f"{f': it has the section {min(sections)}' if sections else ''}.\n"
            "  A server's settings stand at the top, such as model_path: Qwen/Qwen3-8B;"
            " configs/SERVER.md lists them."
        )


def _judge(values: Mapping[str, Any]) -> tuple[ServerConfig, list[Fault]]:
    """The settings and all that is wrong with them; with faults they are only good for looking."""
    try:
        config = ServerConfig.model_validate(values)
    except ValidationError as error:
        faults = _faults(error)
        rest = {name: value for name, value in values.items() if name not in _named(faults)}
        rest.setdefault("model_path", STAND_IN)
        try:
            config = ServerConfig.model_validate(rest)
        except ValidationError:
            return ServerConfig(model_path=STAND_IN), faults
        others = [fault for fault in judged(config)[1] if fault.path[0] not in _named(faults)]
        return config, [*faults, *others]
    return config, judged(config)[1]


def _named(faults: Sequence[Fault]) -> set[str]:
    return {str(fault.path[0]) for fault in faults if fault.path}


def _faults(error: ValidationError) -> list[Fault]:
    """Pydantic's findings, one for each setting: branches of a union are one finding."""
    found: dict[str, list[Detail]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(str(detail["loc"][0]) if detail["loc"] else "", []).append(detail)  # pyright: ignore[reportArgumentType]
    return [
        Fault((name,) if name else (), _sentence(name, details)) for name, details in found.items()
    ]


def _sentence(name: str, details: Sequence[Detail]) -> str:
    limits = [detail for detail in details if detail["type"] in LIMITS]
    detail = limits[0] if limits else details[0]
    kind = detail["type"]
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        near = get_close_matches(name, ServerConfig.model_fields, 1)
        return f"unknown field; {f'did you mean {near[0]}?' if near else LISTED}"
    field = ServerConfig.model_fields[name]
    if kind == "missing":
        return f"required; for example {name}: Qwen/Qwen3-8B"
    if limits:
        limit, words = LIMITS[kind]
        bound = detail["ctx"][limit]
        if limit == "gt" and bound == 0 and int in branches(field.annotation):
            words, bound = "at least", 1
        return f"is {shown(detail['input'])}; it must be {words} {bound}"
    if kind == "string_pattern_mismatch":
        return f"is {shown(detail['input'])}; write auto or tcp://host:port"
    value = detail["input"]
    kinds = branches(field.annotation)
    choices = [str(one) for kind in kinds if get_origin(kind) is not None for one in get_args(kind)]
    near = get_close_matches(value, choices, 1) if isinstance(value, str) else []
    if near:
        return f"is {value}; did you mean {near[0]}? It takes {wanted(field.annotation)}"
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    what = "the text " if isinstance(value, str) else ""
    return (
        f"is {what}{shown(value)}; wanted {wanted(field.annotation)}:"
        f" for example {name}: {example(field.annotation, default)}"
    )


def _no_section(stray: Override) -> str:
    return f"a server's settings have no sections; write --{PREFIX}{stray.path[-1]}"


def _told(
    path: Path, document: yaml12.Document, overrides: Sequence[Override], fault: Fault
) -> tuple[int, str]:
    """The fault where it was written last, and its line; those of options come after all lines."""
    if not fault.path:
        return 1, f"{path}: {fault.text}"
    name = dotted(fault.path)
    if any(one.path[0] == fault.path[0] for one in overrides):
        return AFTER_ALL, f"--{PREFIX}{name}: {fault.text}"
    line = _line(document, fault.path)
    return line, f"{path}:{line}: {name}: {fault.text}"


def _line(document: yaml12.Document, path: Steps) -> int:
    parts = (path[:length] for length in range(len(path), 0, -1))
    return next((document.places[part].line for part in parts if part in document.places), 1)


def _as_meant(override: Override) -> str:
    """The value in quotes where YAML takes it for a number and the setting takes only text."""
    name = override.name.removeprefix(PREFIX)
    field = ServerConfig.model_fields.get(name)
    kinds = branches(field.annotation) if field else ()
    if str in kinds and not {bool, int, float}.intersection(kinds):
        value = yaml12.scalar(override.text)
        if isinstance(value, bool | int | float):
            return f"'{override.text}'"
    return override.text
