"""From a training server's flat file and `--server.key value` overrides to a `ServerConfig`.

All errors are reported in one message, each with its line or option: those of the file, and those
that the workers would raise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.loading.cli_overrides import Override, apply
from penstock.config.loading.expand_paths import expand_paths
from penstock.config.loading.fault_locations import (
    ErrorLocator,
    LocatedError,
    quote_text_value,
    raise_if_any,
)
from penstock.config.loading.load import read_document
from penstock.config.loading.validate import depends_on_invalid, validate_fields
from penstock.config.server.config import ServerConfig, validate_server
from penstock.config.server.run_fields import SERVER
from penstock.config.translate.apply import detect_dialect
from penstock.core.errors import ConfigError

# Of options that are for the server's file.
PREFIX = "server."


@dataclass(frozen=True)
class _Option(Override):
    """A setting as typed; its name is without the prefix."""

    @property
    def option(self) -> str:
        return f"--{PREFIX}{self.name}"


def load_server(
    path: Path, overrides: Sequence[Override] = (), notify: Callable[[str], None] = lambda _: None
) -> ServerConfig:
    """The config in a server's file, with the overrides applied in order.

    `notify` gets a line for each documented default that the server cannot use. Raises ConfigError,
    whose text has one line for each error.
    """
    document = read_document(path, may_be_empty=bool(overrides))
    _require_flat(path, document.value)
    own = [override for override in overrides if override.name.startswith(PREFIX)]
    options = [_Option(override.name.removeprefix(PREFIX), override.text) for override in own]
    stray = [
        _no_section(index, override)
        for index, override in enumerate(overrides, len(options))
        if override not in own
    ]
    quoted = [quote_text_value(option, ServerConfig) for option in options]
    values, refused = apply(document.value, quoted)
    unexpanded = expand_paths(values, root=ServerConfig)
    config, faults = validate_fields(values, ServerConfig)
    faults += unexpanded
    validated = validate_server(config)
    faults += [fault for fault in validated.faults if not depends_on_invalid(fault, faults)]
    raise_if_any([*ErrorLocator(document, options, path).locate(faults, refused), *stray])
    for line in validated.notices:
        notify(line)
    return config


def _require_flat(path: Path, settings: Mapping[str, Any]) -> None:
    dialect = detect_dialect(settings)
    remark = f"it is written for {dialect.title}" if dialect and dialect is not SERVER else ""
    if sections := {"model", "train", "data"} & settings.keys():
        remark = f"it has the section {min(sections)}"
    if remark:
        raise ConfigError(
            f"{path} is no server's file: {remark}.\n"
            "  A server's settings stand at the top, such as model_path: Qwen/Qwen3-8B;"
            " configs/SERVER.md lists them."
        )


def _no_section(index: int, stray: Override) -> LocatedError:
    text = f"a server's settings have no sections; write --{PREFIX}{stray.path[-1]}"
    return (1, index), f"{stray.option}: {text}"
