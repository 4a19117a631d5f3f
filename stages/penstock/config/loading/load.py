"""From a config file and overrides to a `RunConfig`. The only file here that reads files.

All errors are reported in one message, each with its line or option.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.config.loading import yaml12
from penstock.config.loading.cli_overrides import Override, apply
from penstock.config.loading.expand_paths import expand_paths
from penstock.config.loading.fault_locations import (
    ErrorLocator,
    LocatedError,
    quote_text_value,
    raise_if_any,
)
from penstock.config.loading.schema_tree import sections
from penstock.config.loading.validate import validate
from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")

# Maximum size of a config, in bytes.
LARGEST = 1 << 20

# File extensions of data, not of configs.
DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def load(
    path: Path,
    overrides: Sequence[Override] = (),
    notify: Callable[[str], None] = lambda _: None,
    *,
    strict: bool = False,
) -> RunConfig:
    """The run in a YAML file, with the overrides applied in order.

    `notify` gets a line if the file is written for another tool and was translated, for each of its
    keys that is left out, and for documented defaults that the run cannot use. With `strict` keys
    that are left out are errors. Raises ConfigError, whose text has one line for
    each error.
    """
    document = read_document(path, may_be_empty=bool(overrides))
    settings: dict[str, Any] = document.value or {}
    if not is_native(settings):
        from penstock.config.translate import load_foreign  # the tables of all dialects

        load_foreign.require_run(path, settings)
        if dialect := load_foreign.detect_dialect(settings):
            return load_foreign.load(path, document, dialect, overrides, notify, strict=strict)
    return build_run(settings, overrides, ErrorLocator(document, overrides, path), notify=notify)


def loads(settings: Mapping[str, Any], overrides: Sequence[Override] = ()) -> RunConfig:
    """The run in plain values: nested mappings, as from YAML.

    Raises ConfigError, whose text has one line for each error.
    """
    return build_run(settings, overrides, ErrorLocator(yaml12.Document(), overrides), expands=False)


def read_document(path: Path, *, may_be_empty: bool) -> yaml12.Document:
    """The parsed file, whose top level is a mapping; it may be empty only with `may_be_empty`.

    Raises ConfigError if the file does not exist, is not YAML, or is not a mapping.
    """
    if path.suffix.lower() in DATA and os.path.isfile(path):  # noqa: PTH113 - of any name
        raise ConfigError(
            f"{path} is data, and a config is YAML; penstock init {path} writes one for it"
        )
    try:
        document = yaml12.parse(_text(path))
    except yaml12.YamlError as error:
        raise ConfigError(f"{path}:{error.line}: not valid YAML: {error}") from None
    if document.value is None and not document.faults and not may_be_empty:
        raise ConfigError(f"{path}: the file is empty; copy one from configs/ to begin with")
    value: object = document.value
    if not isinstance(value, dict | None):
        line = document.positions[()].line
        raise ConfigError(
            f"{path}:{line}: the top level is not a mapping; write names with a colon, such as"
            " model:, each on a line of its own"
        )
    document.value = document.value or {}
    return document


def is_native(settings: Mapping[str, Any]) -> bool:
    """Whether all names of the first two levels are fields of ours, so no dialect needs to be
    detected."""
    fields = {name: kind.model_fields for name, kind in sections().items()}
    return all(
        name in fields and isinstance(section, dict) and section.keys() <= fields[name].keys()
        for name, section in settings.items()
    )


def _text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        # A pipe of this process, such as that of a shell's `<(command)`, is read.
        is_descriptor = str(path).startswith(("/dev/fd/", "/dev/stdin"))
        if stat.S_ISCHR(mode) or (stat.S_ISFIFO(mode) and not is_descriptor):
            raise ConfigError(f"{path} is a device or a pipe, not a file; name a YAML file")
        if path.stat().st_size > LARGEST:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes, and a config has at most {LARGEST:,}; "
                "name a YAML file"
            )
        # Editors on Windows may begin a file with a byte order mark, which is not part of the text.
        return path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
        hint = f" with {', '.join(inside[:5])}" if inside else ""
        raise ConfigError(f"{path} is a folder{hint}; write a YAML file") from None
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
    if path.is_symlink():
        return f": it is a link to {path.readlink()}, which does not exist; name a YAML file"
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in SUFFIXES]
    except OSError:
        return f", and neither does the folder {path.parent}; name a YAML file"
    near = get_close_matches(path.name, names, 1) or sorted(names)[:1]
    return f"; did you mean {path.with_name(near[0])}?" if near else "; name a YAML file"


def build_run(
    settings: Mapping[str, Any],
    overrides: Sequence[Override],
    locator: ErrorLocator,
    more: Sequence[LocatedError] = (),
    notify: Callable[[str], None] = lambda _: None,
    *,
    expands: bool = True,
) -> RunConfig:
    """The run with the overrides applied. `more` are earlier errors; `expands` says whether `~` and
    variables in the paths of `settings` must still be expanded; those of overrides always are.

    Raises ConfigError with a line for each error.
    """
    values, refused = apply(settings, [quote_text_value(override) for override in overrides])
    unexpanded = expand_paths(
        values, None if expands else [override.path for override in overrides]
    )
    judged = validate(values)
    raise_if_any([*more, *locator.locate([*unexpanded, *judged.faults], refused)])
    for line in judged.notices:
        notify(line)
    return judged.run
