"""Expansion of `~`, `$NAME`, `${NAME}` and `${NAME:-default}` in settings that are paths or URLs.

They are expanded once, when a file is read: cache keys, manifests and `penstock check` have the
expanded value.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from penstock.config.loading.fault import ConfigIssue, Steps
from penstock.config.loading.schema_tree import field_at
from penstock.config.schema.base import FOLDER, ConfigSection, FilePath
from penstock.config.schema.data import is_inline_template
from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.process.allowed_env import is_secret
from penstock.core.remote.urls import is_url
from penstock.core.sources.local_files import GLOB
from penstock.core.sources.megatron_files import find_index

# As in a shell; `$$` is a plain `$`.
VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<bare>[A-Za-z_]\w*)|"
    r"\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\}|(?P<broken>\{[^}]*\}?))"
)

# NAME_MAX and PATH_MAX of Linux, in bytes.
LONGEST_NAME, LONGEST_PATH = 255, 4096


class ExpansionError(ValueError):
    """A variable that is not set, or must not be in a config."""


def expand(text: str) -> str:
    """The text with variables and a leading `~` expanded. Values are not expanded again.

    Raises ExpansionError for a variable without value or default, one that looks like a secret, an
    unknown user, and a text that can be no path.
    """

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        if match["broken"]:
            raise ExpansionError(
                f"{match[0]} is no variable; write ${{NAME}} or ${{NAME:-default}}, and $$ for a "
                "plain $"
            )
        name = match["bare"] or match["name"]
        if is_secret(name):
            raise ExpansionError(
                f"${{{name}}} looks like a secret, and the config of a run is stored with its "
                "results; leave it out: credentials are read from the environment"
            )
        # As in a shell, an empty variable counts as unset where there is a default.
        text = env.variable(name) or match["default"]
        if text is None:
            text = env.variable(name)
        if text is None:
            raise ExpansionError(
                f"${{{name}}} is not set in this environment; export {name}, or write "
                f"${{{name}:-default}}"
            )
        return text

    user = text.partition("/")[0] if text.startswith("~") else ""
    home = os.path.expanduser(user)  # noqa: PTH111 - Path.home() knows one user
    if home.startswith("~"):
        raise ExpansionError(
            f"{user} is the home folder of no user of this machine; write the whole path"
        )
    return _require_path(home + VARIABLE.sub(value, text[len(user) :]))


def _require_path(text: str) -> str:
    # Raise ExpansionError for a text that can be no path on any file system.
    if not is_url(text):
        if text and not text.strip():
            raise ExpansionError("is blank; write a path")
        if "\0" in text:
            raise ExpansionError(f"{text!r} has a null character, which no path has")
        if max(len(part.encode()) for part in text.split("/")) > LONGEST_NAME:
            raise ExpansionError(
                f"has a name of more than {LONGEST_NAME} bytes, which no file system stores"
            )
        if len(text.encode()) > LONGEST_PATH:
            raise ExpansionError(f"is longer than {LONGEST_PATH} bytes, as no path is")
    return text


def expand_paths(
    settings: Mapping[str, Any],
    only: Iterable[Steps] | None = None,
    root: type[ConfigSection] = RunConfig,
) -> list[ConfigIssue]:
    """Expand path settings in place. A setting that cannot be expanded stays, with an issue.

    With `only`, expand only settings at these paths, or above or below them.
    """
    chosen = None if only is None else list(only)
    issues: list[ConfigIssue] = []
    for holder, key, path in paths_in(settings, root):
        if chosen is not None and not any(_is_within(path, steps) for steps in chosen):
            continue
        try:
            typed = holder[key]
            if isinstance(typed, str) and not is_inline_template(typed):
                holder[key] = expand(typed)
            elif isinstance(typed, list):
                entries = cast("list[Any]", typed)
                holder[key] = [
                    expand(entry) if isinstance(entry, str) else entry for entry in entries
                ]
        except ExpansionError as error:
            issues.append(ConfigIssue(path, str(error)))
    return issues


def paths_in(
    values: Any, root: type[ConfigSection] = RunConfig, above: Steps = ()
) -> Iterator[tuple[Any, Any, Steps]]:
    """The settings in these values that are declared to be paths: the mapping that holds each, its
    key there, and its path."""
    if not isinstance(values, dict | list):
        return
    holder = cast("dict[Any, Any] | list[Any]", values)
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        field = field_at((*above, key), root)
        if field and any(isinstance(part, FilePath) for part in field.metadata):
            yield holder, key, (*above, key)
        else:
            yield from paths_in(value, root, (*above, key))


def _is_within(path: Steps, steps: Steps) -> bool:
    shared = min(len(path), len(steps))
    return path[:shared] == steps[:shared]


def anchor_paths(settings: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a run's settings absolute, in place, as they are in `folder`.

    Folders that a run writes are paths, also by default. Other values are paths if they exist, and
    else the id of a hub repository or a name.
    """
    for section, section_field in RunConfig.model_fields.items():
        fields = cast("type[ConfigSection]", section_field.annotation).model_fields
        for key, field in fields.items():
            if FOLDER in field.metadata and isinstance(field.default, str):
                settings.setdefault(section, {}).setdefault(key, field.default)
    for holder, key, path in paths_in(settings):
        value = holder[key]
        if key == "data_files" or not isinstance(value, str) or is_inline_template(value):
            continue
        field = field_at(path)
        is_written = field is not None and FOLDER in field.metadata
        if not is_url(value) and (is_written or _exists(folder, value)):
            holder[key] = str(folder / value)


def _exists(folder: Path, value: str) -> bool:
    # Whether a relative path, glob, or prefix of a Megatron dataset exists in the folder.
    if (folder / value).exists() or find_index(folder / value):
        return True
    is_glob = GLOB.search(value) and not Path(value).is_absolute()
    return bool(is_glob) and any(True for _ in folder.glob(value))
