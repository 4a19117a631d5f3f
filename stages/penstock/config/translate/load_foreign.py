"""From a config file of another tool to a `RunConfig`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config.loading import yaml12
from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.fault_locations import ErrorLocator
from penstock.config.loading.load import read_document, resolve
from penstock.config.schema.run import RunConfig
from penstock.config.server.run_fields import SERVER
from penstock.config.translate.apply import (
    detect_dialect,
    find_dialect,
    translate,
    translate_native,
)
from penstock.config.translate.dialect import Dialect
from penstock.config.translate.fit_parallel_sizes import Devices, devices_here
from penstock.config.translate.translation import Translation
from penstock.core.errors import ConfigError

__all__ = ["detect_dialect", "load", "load_translation"]


OF_A_SERVER = (
    "Without sections, {path} is read as a server's file: penstock serve {path} serves it. A run's "
    "settings are in sections, such as train: {{lr: 1e-5}}."
)


def load(
    path: Path,
    document: yaml12.Document,
    dialect: Dialect,
    overrides: Sequence[Override],
    notify: Callable[[str], None],
) -> RunConfig:
    """The run in a file in `dialect`. Raises ConfigError with a line for each error."""
    translation = translate(document.value, dialect, _devices(overrides))
    told = ErrorLocator(document, overrides, path, translation)
    stopped = [told.at_key(one.key, one.why) for one in translation.of("refused", "unknown")]
    try:
        run = resolve(translation.settings, overrides, told, stopped, notify=notify)
    except ConfigError as error:
        if dialect is not SERVER:
            raise
        raise ConfigError(f"{error}\n  {OF_A_SERVER.format(path=path)}") from None
    notify(_summary(path, translation))
    return run


def load_translation(path: Path, name: str | None, devices: Devices) -> tuple[Translation, str]:
    """The translation of a file, and its errors: a line for each, empty if it is a valid run.

    `name` is that of a dialect; None: it is detected. A file in Penstock's own format is not
    changed. Raises ConfigError if the file is not YAML, or there is no such dialect.
    """
    document = read_document(path, may_be_empty=False)
    dialect = find_dialect(name) if name else detect_dialect(document.value)
    if dialect is None:
        translation = translate_native(document.value, devices)
    else:
        translation = translate(document.value, dialect, devices)
    whole = [Override(name, json.dumps(value)) for name, value in translation.placeholders.items()]
    try:
        resolve(translation.settings, whole, ErrorLocator(document, (), path, translation))
    except ConfigError as error:
        return translation, str(error)
    return translation, ""


def _summary(path: Path, translation: Translation) -> str:
    near, idle, assumed = (
        len(translation.of(kind)) for kind in ("approximated", "no effect", "assumed")
    )
    doubtful = ", ".join(line.key for line in translation.of("doubtful"))
    return (
        f"{path} is written for {translation.title}: {near} of its keys are approximated, {idle}"
        f" have no effect here, and {assumed} of its defaults are assumed;"
        f" penstock translate {path} lists them"
        + (f". Doubtful, check each: {doubtful}" if doubtful else "")
    )


def _devices(overrides: Sequence[Override]) -> Devices:
    """The devices to fit a foreign file to: those of the command line, or of this machine."""
    asked = {one.name: yaml12.scalar(one.text) for one in overrides}
    here = devices_here()
    count, nodes = asked.get("launch.nproc_per_node"), asked.get("launch.nnodes", 1)
    ranks = count if isinstance(count, int) and count > 0 else here.ranks
    return replace(here, ranks=ranks * (nodes if isinstance(nodes, int) and nodes > 0 else 1))
