"""From a configuration file and overrides to a run. The only file here that reads files.

All faults are told at once, each with the line or the option it stands in.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.config import yaml12
from penstock.config.dialects.draft import Translation
from penstock.config.dialects.fit import Devices, devices_here
from penstock.config.dialects.known import named, recognised
from penstock.config.dialects.translate import as_it_is, translate
from penstock.config.judge import judge
from penstock.config.overrides import Override, apply
from penstock.config.run import RunConfig
from penstock.config.telling import Teller, Told, as_meant, require_none
from penstock.core.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


def load(
    path: Path,
    overrides: Sequence[Override] = (),
    notify: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """The run that a YAML file describes, with the overrides put in, the later ones last.

    `notify` is told of a file in another tool's dialect, which is read as `translate` has it.
    Raises ConfigError, whose text has one line for each fault.
    """
    document = document_of(path, may_be_empty=bool(overrides))
    settings: dict[str, Any] = document.value or {}
    dialect = recognised(settings)
    if dialect is None:
        return _run(settings, overrides, Teller(document, overrides, path))
    translation = translate(settings, dialect, _devices(overrides))
    told = Teller(document, overrides, path, translation)
    stopped = [told.of_key(one.key, one.why) for one in translation.of("refused", "unknown")]
    run = _run(translation.settings, overrides, told, stopped)
    notify(_summary(path, translation))
    return run


def loads(settings: Mapping[str, Any], overrides: Sequence[Override] = ()) -> RunConfig:
    """The run that plain values describe: nested mappings, as YAML would give them.

    Raises ConfigError, whose text has one line for each fault.
    """
    return _run(settings, overrides, Teller(yaml12.Document(), overrides))


def load_translation(path: Path, name: str | None, devices: Devices) -> tuple[Translation, str]:
    """The file as it reads in our words, and what is wrong with it then: a line for each fault,
    empty where a run can be made of it.

    `name` is that of its dialect; None: what it is recognised as. Our own is taken as it is.
    Raises ConfigError where it is no YAML, or there is no such dialect.
    """
    document = document_of(path, may_be_empty=False)
    dialect = named(name) if name else recognised(document.value)
    if dialect is None:
        translation = as_it_is(document.value, devices)
    else:
        translation = translate(document.value, dialect, devices)
    whole = [Override(name, json.dumps(value)) for name, value in translation.lacks.items()]
    try:
        _run(translation.settings, whole, Teller(document, (), path, translation))
    except ConfigError as error:
        return translation, str(error)
    return translation, ""


def _summary(path: Path, translation: Translation) -> str:
    near, idle, assumed = (
        len(translation.of(kind)) for kind in ("approximated", "no effect", "assumed")
    )
    return (
        f"{path} is written for {translation.title}: {near} of its keys are approximated, {idle}"
        f" have no effect here, and {assumed} of its defaults are assumed;"
        f" penstock translate {path} lists them"
    )


def _devices(overrides: Sequence[Override]) -> Devices:
    """Those that a foreign file is fitted to: what the command line asks for, or those here."""
    asked = {one.name: yaml12.scalar(one.text) for one in overrides}
    here = devices_here()
    count, nodes = asked.get("launch.nproc_per_node"), asked.get("launch.nnodes", 1)
    ranks = count if isinstance(count, int) and count > 0 else here.ranks
    return replace(here, ranks=ranks * (nodes if isinstance(nodes, int) and nodes > 0 else 1))


def document_of(path: Path, *, may_be_empty: bool) -> yaml12.Document:
    """The file with a mapping at its top; with nothing in it, where it may be empty.

    Raises ConfigError where it is not there, no YAML, or something else.
    """
    try:
        document = yaml12.parse(_text(path))
    except yaml12.YamlError as error:
        raise ConfigError(f"{path}:{error.line}: not valid YAML: {error}") from None
    if document.value is None and not document.faults and not may_be_empty:
        raise ConfigError(f"{path}: the file is empty; copy one from configs/ to begin with")
    value: object = document.value
    if not isinstance(value, dict | None):
        line = document.places[()].line
        raise ConfigError(
            f"{path}:{line}: the top level is no mapping; write names with a colon, such as model:,"
            " each on a line of its own"
        )
    document.value = document.value or {}
    return document


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
    told: Teller,
    more: Sequence[Told] = (),
) -> RunConfig:
    """The run, unless there are faults, of which `more` are known already."""
    values, refused = apply(settings, [as_meant(override) for override in overrides])
    run, faults = judge(values)
    require_none([*more, *told.of(faults, refused)])
    return run
