"""Pins of remote files, by the store's version metadata or else by reading the content.

A pin names files without bucket or server, so moved data keeps its key; and without user or query,
so a newly signed URL keeps its key, too.
"""

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.core import env
from penstock.core.cache.digest_cache import digest_files, sha256_file
from penstock.core.cache.record import digest_json, read_record, write_record
from penstock.core.cache.stage import Source, short
from penstock.core.errors import ArtifactError, ConfigError, StageError
from penstock.core.file_lock import acquire_lock
from penstock.core.files import fsync, remove
from penstock.core.process.retry import PLANNING_TRIES
from penstock.core.remote.artifact_sync import transfer
from penstock.core.remote.open import open_file
from penstock.core.remote.path import RemotePath, require_relative
from penstock.core.remote.urls import is_url, redact, split_parent
from penstock.core.remote.version import content_version, is_digest
from penstock.core.sources.local_files import abbreviate, top_level_names
from penstock.core.sources.remote_files import (
    RemoteFile,
    RemoteFiles,
    find_remote_data,
    missing_url_error,
)

log = logging.getLogger("penstock.prepare")

DOWNLOAD_FOLDER = "fetched"  # Content-addressed folder of downloaded files in the user's cache

CHUNK = 4 << 20


def pin_remote_data(
    url: str, *, split: str | None, data_files: Sequence[str] | None, ds_type: str | None
) -> Source:
    """Pin the data files of a URL. Raises ConfigError and CapabilityError, as for local files."""
    remote = find_remote_data(url, split=split, data_files=data_files, ds_type=ds_type)
    return _build_pin(remote, {"label": remote.label})


def pin_remote_files(url: str, patterns: Sequence[str], lacking: str) -> Source:
    """Pin the files of a folder that match `patterns`, or a single file. Raises ConfigError with
    the text `lacking` if there are none."""
    path = RemotePath.from_url(url)
    info = path.info(tries=PLANNING_TRIES)
    name = split_parent(redact(url))[1]
    if info and _matches(name, patterns):
        return _build_pin(RemoteFiles(name, (RemoteFile(name, path, info),)), {})
    if info:
        raise ConfigError(f"{path.redacted_url} {lacking}.\n  Name its folder, or another file.")
    if path.is_web:
        raise ConfigError(
            f"{path.redacted_url} is no file, and a folder on a web server cannot be listed.\n"
            "  Copy it to a folder here or to an object store, and name that."
        )
    files = path.files(tries=PLANNING_TRIES)
    if not files:
        raise missing_url_error(url)
    chosen = [name for name in files if _matches(name, patterns)]
    if not chosen:
        raise ConfigError(
            f"{path.redacted_url} {lacking}; it has {abbreviate(top_level_names(list(files)))}."
        )
    remote = tuple(RemoteFile(name, path / name, files[name]) for name in chosen)
    return _build_pin(RemoteFiles(split_parent(redact(url))[1], remote), {})


def resolve_folder(typed: str, source: Source) -> str:
    """The readable location of the user's `typed` path: itself, or the folder it was
    downloaded to."""
    return str(_root_folder(source)) if is_url(typed) else typed


def download_source(source: Source) -> Path:
    """The local folder of the files that `source` pins, downloaded if necessary.

    A downloaded folder is verified as local files are; a damaged one is downloaded again. Raises
    StageError if the remote content has changed, or the connection is lost.
    """
    folder = env.cache_home() / DOWNLOAD_FOLDER / short(source.key)
    if not source.urls:
        return _root_folder(source)
    if _is_as_downloaded(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with acquire_lock(folder.with_name(f".{folder.name}.lock")):
        if not _is_as_downloaded(folder):
            if folder.is_dir():
                log.warning("%s is not as it was downloaded, and is downloaded again", folder)
                remove(folder)
            part = folder.with_name(f"{folder.name}.part")
            remove(part)
            part.mkdir()
            # A store's names are not trusted: one with `..` would be written outside of the folder.
            names = [require_relative(str(pinned["name"])) for pinned in source.pin["files"]]
            paths = [part / name for name in names]
            jobs = zip(source.urls, source.pin["files"], paths, strict=True)
            transfer(lambda job: _fetch(*job), jobs)
            write_record(_download_record(folder), {"files": _digest_files(names, paths)})
            # After the record: a folder without one would count as damaged.
            part.rename(folder)
    return folder


def downloaded_files(source: Source) -> list[tuple[Path, str]]:
    """The downloaded files of the URLs that `source` pins, with their SHA-256; none if they are
    not downloaded."""
    folder = env.cache_home() / DOWNLOAD_FOLDER / short(source.key)
    return _recorded_files(folder) or []


def _is_as_downloaded(folder: Path) -> bool:
    files = _recorded_files(folder)
    try:
        return files is not None and digest_files(dict(files)) == list(dict(files).values())
    except OSError:
        return False


def _recorded_files(folder: Path) -> list[tuple[Path, str]] | None:
    """The files of a downloaded folder with their SHA-256, or None without a usable record."""
    try:
        files = read_record(_download_record(folder), "It is downloaded again.")["files"]
        return [(folder / file["name"], file["sha256"]) for file in files]
    except (OSError, ArtifactError, KeyError, TypeError):
        return None


def _download_record(folder: Path) -> Path:
    # Beside the folder, which has the source's files only.
    return folder.with_name(f"{folder.name}.json")


def _root_folder(source: Source) -> Path:
    depth = len(PurePosixPath(str(source.pin["files"][0]["name"])).parts)
    return source.paths[0].parents[depth - 1]


def _fetch(url: str, pinned: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_file(url, pinned) as source, target.open("wb") as stream:
        shutil.copyfileobj(source, stream, CHUNK)
    if target.stat().st_size != pinned["bytes"]:
        raise StageError(
            f"{redact(url)} has changed since this run was planned: {target.stat().st_size} bytes "
            f"were downloaded, {pinned['bytes']} expected.\n  Run again."
        )
    fsync(target)


def _build_pin(remote: RemoteFiles, more: dict[str, Any]) -> Source:
    files: list[dict[str, Any]] = []
    for file in remote.files:
        version = content_version(file.info)
        if version is None or file.info["size"] is None:
            return _pin_by_content(remote, more)
        if not is_digest(version):
            # Such versions are only unique per server.
            version = {**version, "url": file.path.redacted_url}
        files.append({"name": file.name, "bytes": int(file.info["size"]), **version})
    urls = tuple(file.path.url for file in remote.files)
    return Source({"kind": "files", **more, "files": files}, urls=urls)


def _pin_by_content(remote: RemoteFiles, more: dict[str, Any]) -> Source:
    # Such files are read in every run, because a change between two runs would not be noticed.
    home = env.cache_home() / DOWNLOAD_FOLDER
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".reading-", dir=home) as folder:
        names = [require_relative(file.name) for file in remote.files]
        for file, name in zip(remote.files, names, strict=True):
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_file(file.path.url) as source, target.open("wb") as stream:
                shutil.copyfileobj(source, stream, CHUNK)
        digests = _digest_files(names, [Path(folder) / name for name in names])
        digest_folder = home / short(digest_json(digests))
        for name in names:
            (digest_folder / name).parent.mkdir(parents=True, exist_ok=True)
            # A rename: a run that has the same content open keeps its file.
            (Path(folder) / name).replace(digest_folder / name)
    paths = tuple(digest_folder / name for name in names)
    return Source({"kind": "files", **more, "files": digests}, paths)


def _digest_files(names: Sequence[str], paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [
        {"name": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for name, path in zip(names, paths, strict=True)
    ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # PurePath.match compares from the right: `*.json` would match `a/b.json` too.
    same_depth = [pattern for pattern in patterns if pattern.count("/") == name.count("/")]
    return any(map(PurePosixPath(name).match, same_depth))
