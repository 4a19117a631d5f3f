"""Resolve a URL to data files: a file, a folder (prefix) or a glob, as for local paths. Only lists
files and reads no content, so missing files and denied access are known before any work starts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from penstock.core.errors import ConfigError
from penstock.core.process.retry import PLANNING_TRIES, retry_until_connected
from penstock.core.remote.errors import StorageError, to_planning_error
from penstock.core.remote.path import Info, RemotePath
from penstock.core.remote.urls import redact, split_parent, url_join
from penstock.core.sources import local_files
from penstock.core.sources.datasets_folder import SPLITS, STATE, SavedFolder
from penstock.core.sources.local_files import GLOB, abbreviate, hint_at, top_level_names


@dataclass(frozen=True)
class RemoteFile:
    """A file: its name in the pin, its location, and the store's metadata."""

    name: str
    path: RemotePath
    info: Info


@dataclass(frozen=True)
class RemoteFiles:
    """Files in reading order; `label` is the name shown to users."""

    label: str
    files: tuple[RemoteFile, ...]


def find_remote_data(
    url: str, *, split: str | None, data_files: Sequence[str] | None, ds_type: str | None
) -> RemoteFiles:
    """The data files of the URL, or those named by `data_files` in that folder. Raises ConfigError
    if there are none, CapabilityError if access is denied."""
    local_files.check_split(redact(url), split)
    remote = _find(url, split, data_files, ds_type)
    for file in remote.files:
        local_files.check_kind(file.name, ds_type, redact(url))
    local_files.reject_other_split(redact(url), [file.name for file in remote.files], split)
    return remote


def _find(
    url: str, split: str | None, data_files: Sequence[str] | None, ds_type: str | None
) -> RemoteFiles:
    path = RemotePath.from_url(url)
    if not path.is_web and GLOB.search(url):
        return _glob(path)
    info = None if data_files else path.info(tries=PLANNING_TRIES)
    if info:
        name = split_parent(redact(url))[1]
        return RemoteFiles(name, (RemoteFile(name, path, info),))
    if path.is_web:
        if not data_files:
            raise ConfigError(
                f"{path.redacted_url} does not exist: the server does not know it.\n"
                "  Check its spelling. A folder on a web server cannot be listed: name its files "
                "with data_files."
            )
        web_files = tuple(_resolve_web_file(path, name) for name in data_files)
        return RemoteFiles(_label(path), web_files)
    files = path.files(tries=PLANNING_TRIES)
    if not files:
        raise missing_url_error(url)
    if data_files:
        chosen = [file for name in data_files for file in _data_file(path, files, name)]
    else:
        notes = _saved_files(path, files, split)
        chosen = notes or local_files.select_data_files(
            path.redacted_url, list(files), split=split, ds_type=ds_type
        )
    remote_files = tuple(RemoteFile(name, path / name, files[name]) for name in chosen)
    return RemoteFiles(_label(path), remote_files)


def missing_url_error(url: str) -> ConfigError:
    """The error for a URL with no files, with similar names."""
    parent, name = split_parent(redact(url))
    names = sorted(RemotePath.from_url(parent).names()) if name else []
    if not names:
        return ConfigError(f"{redact(url)} does not exist.\n  There is nothing in {parent} either.")
    hint = hint_at(name, names, f"it holds {abbreviate(names)}.")
    return ConfigError(f"{redact(url)} does not exist.\n  In {parent}: {hint}")


def _label(path: RemotePath) -> str:
    return PurePosixPath(path.redacted_url.split("://", 1)[1]).name


def _glob(path: RemotePath) -> RemoteFiles:
    """Files that match the glob, named relative to the last folder without a wildcard."""
    try:
        # fsspec keeps listings for the whole process, also of folders that have got files since.
        path.system.invalidate_cache()
        entries: Any = retry_until_connected(
            lambda: path.system.glob(path.path, detail=True), tries=PLANNING_TRIES
        )
    except StorageError as fault:
        if fault.kind != "absent":
            raise to_planning_error(fault, path.url) from None
        entries = {}
    infos = {
        name: info
        for name, info in sorted(entries.items())
        if info.get("type") == "file" and not PurePosixPath(name).name.startswith(".")
    }
    root = GLOB.split(path.path, 1)[0].rpartition("/")[0]
    url = GLOB.split(path.url, 1)[0].rpartition("/")[0]
    if not infos:
        names = RemotePath.from_url(url).names()
        raise ConfigError(
            f"{path.redacted_url} matches no file.\n  {url} holds {abbreviate(sorted(names))}."
        )
    folder = RemotePath(url, path.system, root)
    files = ((name.removeprefix(root + "/"), info) for name, info in infos.items())
    return RemoteFiles(
        _label(folder), tuple(RemoteFile(name, folder / name, info) for name, info in files)
    )


def _resolve_web_file(path: RemotePath, name: str) -> RemoteFile:
    file = RemotePath.from_url(url_join(path.url, name))
    info = file.info(tries=PLANNING_TRIES)
    if info is None:
        raise ConfigError(
            f"data_files: {name} is not in {path.redacted_url}: the server does not know it.\n"
            "  Check its spelling."
        )
    return RemoteFile(name, file, info)


def _data_file(path: RemotePath, files: dict[str, Info], name: str) -> list[str]:
    if name in files:
        return [name]
    if GLOB.search(name):
        depth = name.count("/")
        matching = [file for file in files if PurePosixPath(file).match(name)]
        if same_depth := [file for file in matching if file.count("/") == depth]:
            return same_depth
    names = list(files)
    hint = hint_at(name, names, f"it has {abbreviate(top_level_names(names))}.")
    raise ConfigError(f"data_files: {name} is not in {path.redacted_url}.\n  There: {hint}")


def _saved_files(path: RemotePath, files: dict[str, Info], split: str | None) -> list[str] | None:
    if SPLITS in files:
        folder = SavedFolder(Path(), tuple(_read_metadata(path / SPLITS).get("splits") or ()))
    elif STATE in files:
        folder = SavedFolder(Path(), None)
    else:
        return None
    split_folder = folder.select_split(path.redacted_url, split)
    state = _read_metadata(path / (split_folder / STATE).as_posix())
    names = [
        (split_folder / entry["filename"]).as_posix() for entry in state.get("_data_files") or ()
    ]
    # Of the listing, so that no name of the metadata leads out of the folder.
    absent = [name for name in names if name not in files]
    if state.get("_indices_data_files") or absent or not names:
        raise ConfigError(
            f"{path.redacted_url} is incomplete, or was saved with an indices mapping by an old "
            f"release of datasets{f': {absent[0]} does not exist' if absent else ''}.\n"
            "  Save it again: flatten_indices().save_to_disk(…)."
        )
    return names


def _read_metadata(path: RemotePath) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(path.read() or b""))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path.redacted_url} cannot be read as JSON.\n  Save the data set again."
        ) from error
