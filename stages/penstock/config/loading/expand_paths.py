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
from penstock.config.loading.schema_tree import sections
from penstock.config.schema.data import is_inline_template
from penstock.core import env
from penstock.core.process.allowed_env import is_secret
from penstock.core.remote.urls import is_url
from penstock.core.sources.local_files import GLOB
from penstock.core.sources.megatron_files import find_index

PATH_FIELDS = frozenset(
    {
        *("model.model_path", "model.config_path", "model.tokenizer_path"),
        *("lora.init_adapter_path", "data.dataset_prepared_path", "pipeline.artifacts_path"),
        "data.chat_template",
        *("train.output_dir", "train.load_checkpoint_path", "train.init_checkpoint_path"),
        *("train.log_dir", "train.profile_trace_dir", "train.mlflow_tracking_uri", "push.url"),
    }
)
WRITTEN_FIELDS = frozenset(
    {
        *("data.dataset_prepared_path", "pipeline.artifacts_path"),
        *("train.output_dir", "train.log_dir", "train.profile_trace_dir"),
    }
)
"""Those of folders that a run writes."""

SERVER_PATH_FIELDS = frozenset(
    {
        *("model_path", "config_path", "tokenizer_path", "output_dir", "load_checkpoint_path"),
        "api_keys_file",
    }
)
ENCODER_FIELDS = ("model_path", "config_path")
DATASET_LISTS = ("datasets", "test_datasets", "decontaminate_datasets")
DATASET_FIELDS = ("path", "data_files", "image_folder")
VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<bare>[A-Za-z_]\w*)|"
    r"\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\}|(?P<broken>\{[^}]*\}?))"
)
"""As in a shell; `$$` is a plain `$`."""

LONGEST_NAME, LONGEST_PATH = 255, 4096
"""NAME_MAX and PATH_MAX of Linux, in bytes."""


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
    """Raise ExpansionError for a text that can be no path on any file system."""
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
    settings: Mapping[str, Any], only: Iterable[Steps] | None = None
) -> list[ConfigIssue]:
    """Expand a run's path settings in place. A setting that cannot be expanded stays, with an
    issue.

    With `only`, expand only settings at these paths, or above or below them.
    """
    locations = _places(settings)
    if only is not None:
        chosen = list(only)
        locations = (
            holder_path
            for holder_path in locations
            if any(_is_within(holder_path[2], steps) for steps in chosen)
        )
    return _expand(locations)


def _is_within(path: Steps, steps: Steps) -> bool:
    """Whether one of the two begins with the other."""
    shared = min(len(path), len(steps))
    return path[:shared] == steps[:shared]


def anchor_paths(settings: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a run's settings absolute, in place, as they are in `folder`.

    Folders that a run writes are paths, also by default. Other values are paths if they exist, and
    else the id of a hub repository or a name.
    """
    for name in WRITTEN_FIELDS:
        section, _, key = name.partition(".")
        default = sections()[section].model_fields[key].get_default()
        if isinstance(default, str):
            settings.setdefault(section, {}).setdefault(key, default)
    for holder, key, path in _places(settings):
        value = holder[key]
        if key == "data_files" or not isinstance(value, str) or is_inline_template(value):
            continue
        is_written = ".".join(map(str, path)) in WRITTEN_FIELDS
        if not is_url(value) and (is_written or _exists(folder, value)):
            holder[key] = str(folder / value)


def _exists(folder: Path, value: str) -> bool:
    """Whether a relative path, glob, or prefix of a Megatron dataset exists in the folder."""
    if (folder / value).exists() or find_index(folder / value):
        return True
    is_glob = GLOB.search(value) and not Path(value).is_absolute()
    return bool(is_glob) and any(True for _ in folder.glob(value))


def expand_server_paths(settings: dict[str, Any]) -> list[ConfigIssue]:
    """The same for a server's settings, which have no sections."""
    names = sorted(SERVER_PATH_FIELDS & settings.keys())
    return _expand((settings, name, (name,)) for name in names)


def _expand(locations: Iterable[tuple[dict[str, Any], str, Steps]]) -> list[ConfigIssue]:
    faults: list[ConfigIssue] = []
    for holder, key, path in locations:
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
            faults.append(ConfigIssue(path, str(error)))
    return faults


def _places(settings: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, Steps]]:
    for name in sorted(PATH_FIELDS):
        section, _, key = name.partition(".")
        holder = settings.get(section)
        if isinstance(holder, dict) and key in holder:
            yield cast("dict[str, Any]", holder), key, (section, key)
    yield from _encoder_places(settings.get("model"))
    data = settings.get("data")
    for name in DATASET_LISTS if isinstance(data, dict) else ():
        entries = cast("dict[str, Any]", data).get(name)
        listed = cast("list[Any]", entries) if isinstance(entries, list) else []
        for number, entry in enumerate(listed):
            for key in DATASET_FIELDS if isinstance(entry, dict) else ():
                if key in entry:
                    yield cast("dict[str, Any]", entry), key, ("data", name, number, key)


def _encoder_places(model: Any) -> Iterator[tuple[dict[str, Any], str, Steps]]:
    encoders = cast("dict[str, Any]", model).get("encoders") if isinstance(model, dict) else None
    entries = cast("dict[str, Any]", encoders) if isinstance(encoders, dict) else {}
    for kind, entry in entries.items():
        for key in ENCODER_FIELDS if isinstance(entry, dict) else ():
            if key in entry:
                yield cast("dict[str, Any]", entry), key, ("model", "encoders", kind, key)
